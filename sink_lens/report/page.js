"use strict";
// What the page does beside being read: numbers are copied as CSV, and a head is chosen to see its pattern.
// Whatever a run says is set as text, never as markup.

const parsed = (id) => JSON.parse(document.getElementById(id).textContent);
const { csv, colours } = parsed("data");
const viridis = new Uint8Array(colours.match(/../g).map((pair) => parseInt(pair, 16)));

for (const button of document.querySelectorAll("[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", () => copy(button, csv[button.dataset.copy]));
}

async function copy(button, text) {
  const said = button.nextElementSibling?.matches(".said") ? button.nextElementSibling : document.createElement("span");
  said.className = "said";
  said.setAttribute("role", "status");
  button.after(said);
  try {
    await navigator.clipboard.writeText(text);
    said.textContent = `${text.trimEnd().split("\n").length - 1} rows copied`;
  } catch {
    said.textContent = "copy it from here";
    const shown = said.nextElementSibling?.matches(".copied") ? said.nextElementSibling : document.createElement("textarea");
    shown.className = "copied";
    shown.readOnly = true;
    shown.value = text;
    said.after(shown);
    shown.select();
  }
}

function unpacked(text) {
  const characters = atob(text), bytes = new Uint8Array(characters.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = characters.charCodeAt(at);
  return bytes;
}

/** The heat map of a run's heads and the pattern of the chosen one. */
function heads(viewer, run) {
  const map = document.querySelector(`[data-map="${viewer.dataset.viewer}"]`);
  const image = map.querySelector("image");
  if (!image) return;
  const bytes = unpacked(run.patterns);
  const size = (run.length * (run.length + 1)) / 2;
  const find = (selector) => viewer.querySelector(selector);
  const canvas = find("canvas"), layer = find("[data-layer]"), head = find("[data-head]");
  const mark = document.createElement("div");
  let chosen = -1, cell = null;

  layer.max = run.layers - 1;
  head.max = run.heads - 1;
  viewer.hidden = false;
  mark.className = "mark";
  map.classList.add("map");
  map.append(mark);
  map.tabIndex = 0;
  map.setAttribute("role", "group");
  map.setAttribute("aria-label", `${map.getAttribute("aria-label")} Arrow keys choose a head.`);

  const value = (query, key) => bytes[chosen * size + (query * (query + 1)) / 2 + key] / 255;
  const place = (at) => `${at}${run.tokens[at] ? ` “${run.tokens[at]}”` : ""}`;

  function choose(row, column) {
    layer.value = Math.min(Math.max(row, 0), run.layers - 1);
    head.value = Math.min(Math.max(column, 0), run.heads - 1);
    chosen = run.chosen.indexOf(layer.value * run.heads + Number(head.value));
    const score = run.scores[layer.value][head.value];
    find(".chosen").textContent =
      `L${layer.value}.H${head.value}: sink score ${score === null ? "undefined" : score.toFixed(2)}` +
      (chosen < 0 ? "; its pattern is not in this page" : "");
    find("[data-step='-1']").disabled = chosen === 0;
    find("[data-step='1']").disabled = chosen === run.chosen.length - 1;
    const chosenCell = cell ?? { query: run.length - 1, key: run.position };
    outline();
    chosen < 0 ? clear() : read(chosenCell.query, chosenCell.key);
  }

  function outline() {
    const box = image.getBoundingClientRect(), around = map.getBoundingClientRect();
    const width = box.width / run.layers, height = box.height / run.heads;
    mark.style.left = `${box.left - around.left + map.scrollLeft + layer.value * width}px`;
    mark.style.top = `${box.top - around.top + head.value * height}px`;
    mark.style.width = `${width}px`;
    mark.style.height = `${height}px`;
  }

  function clear() {
    canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
    find(".cell").textContent = "";
  }

  function draw() {
    canvas.width = canvas.height = run.length;
    const context = canvas.getContext("2d"), pixels = context.createImageData(run.length, run.length);
    for (let query = 0; query < run.length; query++) {
      for (let key = 0; key <= query; key++) {
        const at = 4 * (query * run.length + key), colour = 3 * Math.round(255 * value(query, key));
        pixels.data.set(viridis.subarray(colour, colour + 3), at);
        pixels.data[at + 3] = 255;
      }
    }
    context.putImageData(pixels, 0, 0);
  }

  function read(query, key) {
    query = Math.min(Math.max(query, 0), run.length - 1);
    key = Math.min(Math.max(key, 0), query);
    cell = { query, key };
    draw();
    const context = canvas.getContext("2d");
    context.fillStyle = "rgb(213 94 0)";
    context.fillRect(key, query, 1, 1);
    const text = `Query ${place(query)} gives key ${place(key)} ${(100 * value(query, key)).toFixed(0)}% of its attention.`;
    find(".cell").textContent = text;
    canvas.setAttribute("aria-label", `Attention pattern of layer ${layer.value}, head ${head.value}. Arrow keys move. ${text}`);
  }

  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const onArrows = (element, go) => element.addEventListener("keydown", (event) => {
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    go(...move);
  });
  const inside = (event, box, columns, rows) => [
    Math.floor(((event.clientX - box.left) / box.width) * columns),
    Math.floor(((event.clientY - box.top) / box.height) * rows),
  ];

  map.addEventListener("click", (event) => {
    const [column, row] = inside(event, image.getBoundingClientRect(), run.layers, run.heads);
    if (column >= 0 && column < run.layers && row >= 0 && row < run.heads) choose(column, row);
  });
  onArrows(map, (down, right) => choose(Number(layer.value) + right, Number(head.value) + down));
  onArrows(canvas, (down, right) => chosen >= 0 && read(cell.query + down, cell.key + right));
  canvas.addEventListener("pointermove", (event) => {
    const [key, query] = inside(event, canvas.getBoundingClientRect(), run.length, run.length);
    if (chosen >= 0 && key >= 0 && key <= query && query < run.length) read(query, key);
  });
  for (const input of [layer, head]) {
    input.addEventListener("change", () => choose(Number(layer.value), Number(head.value)));
  }
  for (const button of viewer.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => {
      const next = run.chosen[Math.max(chosen + Number(button.dataset.step), 0)];
      choose(Math.floor(next / run.heads), next % run.heads);
    });
  }
  addEventListener("resize", outline);
  const strongest = run.chosen[0] ?? 0;
  choose(Math.floor(strongest / run.heads), strongest % run.heads);
}

const runs = parsed("pattern-data");
for (const viewer of document.querySelectorAll("[data-viewer]")) heads(viewer, runs[viewer.dataset.viewer]);

function hints() {
  for (const hint of document.querySelectorAll(".hint")) {
    const next = hint.nextElementSibling;
    const box = next.matches(".scroll") ? next : next.querySelector(".scroll");
    hint.hidden = box.scrollWidth <= box.clientWidth;
    if (box.dataset.map !== undefined) continue; // has its own keys
    if (hint.hidden) box.removeAttribute("tabindex");
    else box.tabIndex = 0; // the arrow keys scroll it
  }
}

// On paper nothing is folded, and a link to what is folded opens it.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
addEventListener("hashchange", () => {
  const folded = document.querySelector(`${location.hash || "#none"} > details`);
  if (folded) folded.open = true;
});

// What is not on the screen is laid out after the rest, so that the page answers at once.
(window.requestIdleCallback ?? setTimeout)(() => {
  document.documentElement.classList.remove("starting");
  hints();
  addEventListener("resize", hints);
});
