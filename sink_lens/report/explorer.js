"use strict";
// The explorer of circuits: graphs in Neuronpedia's JSON are drawn on canvases that d3-zoom moves, laid out by d3-force.
// One function, paint, draws the picture on a canvas and into an SVG. Whatever a file says is set as text, never as markup.

window.exploreCircuits = async (packed) => {
  const root = document.getElementById("explorer");
  const find = (name) => root.querySelector(`[data-${name}]`);
  const stage = find("stage"), panel = find("panel");
  const PALETTES = {
    light: { ink: "#1d1d1b", card: "#ffffff", quiet: "#5f6368", line: "#b9b9b2", raises: "#0072b2", lowers: "#c04f00", q: "#7b3fa0", k: "#2e8b57", v: "#2b6cb0", g: "#8a6d00", other: "#6b6b6b", core: "#00795a", contingent: "#b8860b", focus: "#c04f00" },
    dark: { ink: "#ececea", card: "#1f2226", quiet: "#a3a8ae", line: "#5a6067", raises: "#56b4e9", lowers: "#f0883e", q: "#c79be8", k: "#5fce95", v: "#7db5f0", g: "#e3d24c", other: "#a3a8ae", core: "#2fc79a", contingent: "#e3d24c", focus: "#f0883e" },
  };
  const READS = { q: "a query", k: "a key", v: "a value", g: "a gate" };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const FONT = '11px system-ui, "DejaVu Sans", sans-serif';
  const MANY = 3000; // links beyond which none is dashed, and a gesture moves a picture of them
  const FEW = 60; // nodes up to which a label that has no room moves up or down
  const WIDE = 400; // links that are wider than a pixel: a browser without a graphics card draws 20,000 of these in 9 s
  const MOST_ROWS = 100;
  const known = (format) => (value) => (Number.isFinite(value) ? format(value) : "undefined"); // null is not 0
  const number = known(d3.format(".3~g")), rounded = known(d3.format(".3~f")), percent = (share) => `${number(100 * share)}%`;

  // Graphs

  async function inflate(text) {
    const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  /** A file as a graph: its own object is kept whole, to be saved again with nothing lost. */
  function read(raw) {
    if (!Array.isArray(raw?.nodes) || !Array.isArray(raw?.links)) throw new Error("it has no nodes and links");
    const nodes = new Map(raw.nodes.map((node) => [String(node.node_id), node]));
    const links = raw.links.map((link, at) => {
      const one = { source: String(link.source), target: String(link.target), weight: Number(link.weight), via: String(link.via ?? ""), raw: link, at };
      if (!nodes.has(one.source) || !nodes.has(one.target)) throw new Error(`link ${at} leads to a node that is not there`);
      if (!Number.isFinite(one.weight)) throw new Error(`link ${at} has no weight`);
      return Object.assign(one, { key: `${one.source}\n${one.target}\n${one.via}` });
    });
    const ranked = links.slice().sort((one, other) => Math.abs(other.weight) - Math.abs(one.weight) || one.at - other.at);
    const about = raw.metadata?.sink_lens ?? {};
    return { raw, nodes, links, ranked, about, title: text(about.title ?? raw.metadata?.slug ?? "A graph", 120) };
  }

  function text(value, limit = 60) {
    const shown = String(value ?? "").replace(/[\u0000-\u001f\u007f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "·");
    return shown.length > limit ? `${shown.slice(0, limit - 1)}…` : shown;
  }

  const base = (graph, id) => (graph.about.spans ? id.replace(/@[^@]*$/, "") : id);
  /** The heads that read through a key-value head; another node is itself. */
  function owners(graph, id) {
    const shared = /^a(\d+)\.kv(\d+)$/.exec(base(graph, id)), group = graph.about.group ?? 1;
    return shared ? d3.range(group).map((one) => `a${shared[1]}.h${shared[2] * group + one}`) : [base(graph, id)];
  }

  /** Those links that lie on a path from the input to what the metric reads. */
  function onPath(graph, links) {
    const outputs = new Set(graph.about.outputs);
    const outOf = d3.group(links, (link) => base(graph, link.source)), into = new Map();
    for (const link of links)
      for (const node of owners(graph, link.target)) into.has(node) ? into.get(node).push(link) : into.set(node, [link]);
    const reached = new Set(["input"]), leads = new Set();
    for (const node of reached) // a set that grows while it is walked
      for (const link of outOf.get(node) ?? []) for (const next of owners(graph, link.target)) reached.add(next);
    const ends = (link) => outputs.has(base(graph, link.target) + (link.via && `<${link.via}>`));
    for (const link of links) if (ends(link)) leads.add(base(graph, link.source));
    for (const node of leads) for (const link of into.get(node) ?? []) leads.add(base(graph, link.source));
    return links.filter((link) => reached.has(base(graph, link.source)) && (ends(link) || owners(graph, link.target).some((one) => leads.has(one))));
  }

  const WHICH = {
    all: () => true,
    circuit: (link) => link.raw.in_circuit === true,
    core: (link) => link.raw.core === true,
    contingent: (link) => link.raw.core === false,
    stable: (link) => link.raw.inclusion >= 0.95,
  };

  // What a reader changes; every change can be taken back

  let graphs = [], state = {}, past = [], future = [];

  function begun(graph) {
    const { size, outputs } = graph.about, view = graph.raw.qParams?.sink_lens ?? {}, { pinnedIds, supernodes } = graph.raw.qParams ?? {};
    const known = (ids) => ids.map(String).filter((id) => graph.nodes.has(id));
    const first = {
      n: Math.max(1, Math.min(size ?? graph.links.length, graph.links.length)),
      which: graph.links.some(WHICH.circuit) ? "circuit" : "all",
      connected: Boolean(outputs), colour: "sign", group: "none", positions: Boolean(graph.about.spans),
    };
    for (const key of Object.keys(first)) if (typeof view[key] === typeof first[key]) first[key] = view[key];
    return {
      ...first,
      labels: {},
      pinned: known(Array.isArray(pinnedIds) ? pinnedIds : []),
      groups: (Array.isArray(supernodes) ? supernodes : []).filter(Array.isArray).map(([name, ...ids]) => ({ name: String(name), ids: known(ids) })),
    };
  }

  function change(act) {
    past.push(JSON.stringify(state));
    future = [];
    act(state);
    refresh();
  }

  function goTo(from, to, what) {
    if (!from.length) return;
    to.push(JSON.stringify(state));
    state = JSON.parse(from.pop());
    refresh();
    say(what);
  }

  function say(what, alarm = false) {
    find("said").textContent = what;
    find("said").classList.toggle("alarm", alarm);
  }

  const labelled = (graph, id) => text(Object.hasOwn(state.labels, id) ? state.labels[id] : (graph.nodes.get(id)?.clerp || id));
  const hasLabel = (id) => Object.hasOwn(state.labels, id);

  // The scene: nodes and links as they are shown, and where

  let scene = { panes: [], nodes: new Map(), at: new Map(), rows: [] };

  const STAGES = { "key-value head": 0, "attention head": 1 };
  function rowOf(node) {
    const layer = Number.parseFloat(node.layer);
    return Number.isNaN(layer) || node.feature_type === "embedding" ? -3 : 3 * layer + (node.feature_type === "logit" ? 2.5 : STAGES[node.feature_type] ?? 2);
  }

  const isEnd = (node) => ["embedding", "logit"].includes(node.feature_type);
  function roles(graph, links) {
    const sums = d3.rollup(links, (some) => d3.sum(some, (one) => Math.abs(one.weight)), (one) => one.source, (one) => {
      const reads = { q: "queries", k: "keys", v: "values", g: "gates" }[one.via];
      return `feeds ${reads ?? (graph.nodes.get(one.target).feature_type === "logit" ? "the logits" : "MLPs")}`;
    });
    return (id) => (graph.nodes.get(id).feature_type === "key-value head" ? "shared keys and values" : sums.has(id) ? d3.greatest(sums.get(id), ([, sum]) => sum)[0] : "feeds nothing shown");
  }

  /** The name of the group that a node is drawn as, where it is. */
  function groupOf(graph, links) {
    const ends = (id) => isEnd(graph.nodes.get(id));
    if (state.group === "layer") return (id) => (ends(id) ? null : `layer ${graph.nodes.get(id).layer}`);
    if (state.group === "role") {
      const role = roles(graph, links);
      return (id) => (ends(id) ? null : role(id));
    }
    const mine = new Map(state.group === "hand" ? state.groups.flatMap(({ name, ids }) => ids.map((id) => [id, name])) : []);
    return (id) => mine.get(id) ?? null;
  }

  function paneOf(graph) {
    // A circuit is chosen on some of the pairs, and scores are of all: its edges need not be the largest.
    const among = state.which === "circuit" ? graph.ranked : graph.ranked.slice(0, state.n);
    let links = among.filter(WHICH[state.which] ?? WHICH.all);
    if (state.connected && graph.about.outputs) links = onPath(graph, links);
    const group = groupOf(graph, links), nodes = new Map();
    const put = (id) => {
      const name = group(id), shown = name === null ? id : `(${name})`;
      if (!nodes.has(shown)) {
        const label = name === null ? labelled(graph, id) : text(name);
        nodes.set(shown, { id: shown, label, ids: [], own: graph.nodes.get(id), isGroup: name !== null, size: 0 });
      }
      const node = nodes.get(shown);
      if (!node.ids.includes(id)) node.ids.push(id);
      return node;
    };
    const merged = new Map();
    for (const link of links) {
      const source = put(link.source), target = put(link.target);
      source.size += Math.abs(link.weight);
      target.size += Math.abs(link.weight);
      if (source === target) continue;
      const key = `${source.id}\n${target.id}\n${link.via}`, one = merged.get(key);
      if (one) {
        one.weight += link.weight;
        one.of.push(link);
      } else merged.set(key, { key, source: source.id, target: target.id, weight: link.weight, via: link.via, raw: link.raw, of: [link] });
    }
    for (const id of state.pinned) if (graph.nodes.has(id)) put(id);
    for (const node of nodes.values()) {
      node.row = d3.median(node.ids, (id) => rowOf(graph.nodes.get(id)));
      node.column = node.own.ctx_idx ?? 0;
      if (node.isGroup) node.label += ` (${node.ids.length})`;
    }
    const shared = [...nodes.values()].filter((node) => /\.kv\d/.test(node.id)).flatMap((node) =>
      owners(graph, node.id).map((head) => ({ source: node.id, target: head + node.id.slice(base(graph, node.id).length) })).filter((one) => nodes.has(one.target)));
    const of = [...merged.values()].sort((one, other) => Math.abs(other.weight) - Math.abs(one.weight));
    return { graph, links: of, edges: links, nodes, shared, most: Math.abs(of[0]?.weight ?? 1) || 1 };
  }

  /** Rows by depth; in a row d3-force draws nodes towards their neighbours and apart. */
  function layOut(panes) {
    const nodes = new Map();
    for (const pane of panes) for (const [id, node] of pane.nodes) if (!nodes.has(id)) nodes.set(id, node);
    const all = [...nodes.values()], rows = [...new Set(all.map((node) => node.row))].sort(d3.ascending);
    const columns = [...new Set(all.map((node) => node.column))].sort(d3.ascending);
    const byPlace = state.positions && columns.length > 1;
    const wide = 90 * (1 + d3.max(d3.rollup(all, (some) => some.length, (node) => `${node.row} ${node.column}`).values()));
    const home = (node) => (byPlace ? (columns.indexOf(node.column) + 0.5) * wide : 0);
    const points = [];
    for (const [row, some] of d3.group(all, (node) => node.row)) {
      some.sort((one, other) => one.column - other.column || headOf(one.id) - headOf(other.id));
      some.forEach((node, at) => points.push({ id: node.id, x: home(node) + (at - (some.length - 1) / 2) * 70, fy: rows.indexOf(row) * 60 }));
    }
    if (all.length < 500) {
      const links = panes.flatMap((pane) => [...pane.links, ...pane.shared, ...pane.shared]).map(({ source, target }) => ({ source, target }));
      const simulation = d3.forceSimulation(points).stop()
        .force("home", d3.forceX((point) => home(nodes.get(point.id))).strength(byPlace ? 0.3 : 0.03))
        .force("apart", d3.forceManyBody().strength(-260).distanceMax(400))
        .force("boxes", d3.forceCollide((point) => Math.min(70, onCanvas(ruler).measure(nodes.get(point.id).label) / 2 + 12)))
        .force("links", d3.forceLink(links).id((point) => point.id).distance(0));
      simulation.tick(120);
    }
    const [left, right] = d3.extent(points, (point) => point.x);
    const x = (value) => (right > left ? (value - left) / (right - left) : 0.5);
    scene = { panes, nodes, rows, columns: byPlace ? columns : [], at: new Map(points.map((point) => [point.id, [x(point.x), rows.length > 1 ? point.fy / 60 / (rows.length - 1) : 0.5, x(home(nodes.get(point.id)))]])) };
  }

  const headOf = (id) => Number(/\.(?:h|kv)(\d+)/.exec(id)?.[1] ?? 0);

  // Drawing

  let turn = d3.zoomIdentity, hovered = null, focused = null, matches = new Set(), edge = null;

  function place(id, view) {
    const [x, y, home] = scene.at.get(id), across = (part) => 44 + part * (view.width - 88);
    return [...view.turn.apply([across(x), view.height - 22 - y * (view.height - 22 - view.top)]), view.turn.applyX(across(home))];
  }

  function colourOf(link, pane, palette) {
    if (pane.others) return pane.others.has(link.key) ? palette.other : pane === scene.panes[0] ? palette.raises : palette.lowers;
    if (state.colour === "reads") return palette[link.via] ?? palette.other;
    if (state.colour === "core") return link.raw.core === true ? palette.core : link.raw.core === false ? palette.contingent : palette.other;
    return link.weight < 0 ? palette.lowers : palette.raises;
  }

  /** From the top of one box to the bottom of another; the farther apart, the more it bows away from the middle. */
  function curve(pen, [x0, y0, middle], [x1, y1]) {
    const bend = (y0 - y1) * 0.45, off = Math.max(0, Math.min(7, bend)), bow = Math.sign(x0 + x1 - 2 * middle || 1) * Math.min(90, Math.max(0, Math.abs(y0 - y1) - 90) * 0.25);
    pen.moveTo(x0, y0 - off);
    pen.bezierCurveTo(x0 + bow, y0 - bend, x1 + bow, y1 + bend, x1, y1 + off);
  }

  function line(pen, [x0, y0], [x1, y1]) {
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
  }

  const active = () => new Set([hovered, focused, ...state.pinned.map(shownAs)].filter((id) => id && scene.nodes.has(id)));
  function shownAs(id) {
    if (scene.nodes.has(id)) return id;
    for (const node of scene.nodes.values()) if (node.ids.includes(id)) return node.id;
    return null;
  }

  /** Draws a pane with what can draw: lines in bundles of one look, then boxes, each label only where there is room. */
  function paint(to, pane, view, palette) {
    const at = new Map([...pane.nodes.keys()].map((id) => [id, place(id, view)])), strong = active();
    for (const { source, target } of pane.shared) if (strong.has(target)) strong.add(source); // a head reads there
    const bundles = new Map();
    for (const [rank, link] of pane.links.entries()) {
      const near = !strong.size || strong.has(link.source) || strong.has(link.target);
      const width = Math.max(0.7, Math.min(rank < WIDE ? 9 : 1, Math.round((18 * Math.abs(link.weight)) / pane.most) / 2)), colour = colourOf(link, pane, palette);
      const look = `${near ? 1 : 0}${colour}${link.weight < 0 ? "-" : "+"}${width}`;
      if (!bundles.has(look)) bundles.set(look, { colour, width, dash: link.weight < 0 && pane.links.length <= MANY ? [5, 4] : [], alpha: near ? (strong.size ? 0.9 : 0.6) : 0.07, links: [] });
      bundles.get(look).links.push(link);
    }
    for (const bundle of [...bundles.values()].sort((one, other) => one.alpha - other.alpha)) to.lines(bundle, at);
    if (pane.shared.length) to.lines({ colour: palette.quiet, width: 1, dash: [1, 3], alpha: 0.8, links: pane.shared }, at);
    const boxes = [], inView = ([x, y]) => x > -60 && y > -20 && x < view.width + 60 && y < view.height + 20;
    const first = [...pane.nodes.values()].filter((node) => inView(at.get(node.id))).sort((one, other) =>
      (strong.has(other.id) - strong.has(one.id)) || (matches.has(other.id) - matches.has(one.id)) || (hasLabel(other.id) - hasLabel(one.id)) || (isEnd(other.own) - isEnd(one.own)) || other.size - one.size);
    const named = first.slice(0, 400).map((node) => {
      const [x, y] = at.get(node.id), half = to.measure(node.label) / 2 + 5, inside = x > 0 && x < view.width;
      const middle = inside ? Math.max(half + 2, Math.min(view.width - half - 2, x)) : x;
      for (const down of first.length > FEW ? [0] : [0, 18, -18, 36, -36, 54, -54]) { // of few nodes, each has its label
        const box = [middle - half, y - 8 + down, middle + half, y + 8 + down];
        if (boxes.some((other) => box[0] < other[2] && box[2] > other[0] && box[1] < other[3] && box[3] > other[1])) continue;
        boxes.push(box);
        return box;
      }
      return null;
    });
    for (const [order, node] of [...first.entries()].reverse()) {
      const ring = node.id === focused ? palette.focus : matches.has(node.id) ? palette.contingent : node.ids.some((id) => state.pinned.includes(id)) ? palette.ink : palette.line;
      to.node(node, at.get(node.id), named[order] ?? null, { ring, thick: ring !== palette.line || node.isGroup, palette });
    }
    for (const column of scene.columns) {
      const [left] = place(d3.least([...scene.nodes.values()].filter((one) => one.column === column), (one) => scene.at.get(one.id)[0]).id, view);
      to.words(text(pane.graph.about.spans?.[column] ?? pane.graph.raw.metadata?.prompt_tokens?.[column] ?? column, 16), left - 20, view.height - 4, palette.quiet);
    }
  }

  const onCanvas = (context) => ({
    measure: (label) => ((context.font = FONT), context.measureText(label).width),
    lines({ colour, width, dash, alpha, links }, at) {
      const path = new Path2D();
      const pen = links.length > MANY / 2 ? line : curve;
      for (const link of links) pen(path, at.get(link.source), at.get(link.target));
      Object.assign(context, { strokeStyle: colour, lineWidth: width, globalAlpha: alpha });
      context.setLineDash(dash);
      context.stroke(path);
      context.setLineDash([]);
      context.globalAlpha = 1;
    },
    node(node, [x, y], box, { ring, thick, palette }) {
      Object.assign(context, { fillStyle: box ? palette.card : palette.ink, strokeStyle: ring, lineWidth: thick ? 2.5 : 1 });
      context.beginPath();
      box ? context.roundRect(box[0], box[1], box[2] - box[0], 16, node.isGroup ? 8 : 3) : context.arc(x, y, thick ? 4 : 2.5, 0, 7);
      context.fill();
      if (box || thick) context.stroke();
      if (box) this.words(node.label, box[0] + 5, box[1] + 12, palette.ink);
    },
    words(label, x, y, colour) {
      Object.assign(context, { font: FONT, fillStyle: colour });
      context.fillText(label, x, y);
    },
  });

  const ruler = document.createElement("canvas").getContext("2d");
  const inSvg = (parent) => {
    const add = (name, values, of = parent) => {
      const element = of.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
      for (const [key, value] of Object.entries(values)) element.setAttribute(key, value);
      return element;
    };
    return {
      measure: onCanvas(ruler).measure,
      lines({ colour, width, dash, alpha, links }, at) {
        const bundle = add("g", { fill: "none", stroke: colour, "stroke-width": width, "stroke-opacity": alpha, ...(dash.length && { "stroke-dasharray": dash.join(" ") }) });
        for (const link of links) {
          const pen = d3.path();
          curve(pen, at.get(link.source), at.get(link.target));
          const path = add("path", { d: String(pen).replace(/\d+\.\d+/g, (one) => Number(one).toFixed(1)) }, bundle);
          if (link.key) add("title", {}, path).textContent = sentence(link);
        }
      },
      node(node, [x, y], box, { ring, thick, palette }) {
        const look = { stroke: ring, "stroke-width": thick ? 2.5 : 1 };
        if (!box) return void add("circle", { cx: x, cy: y, r: thick ? 4 : 2.5, fill: palette.ink, ...look });
        add("rect", { x: box[0], y: box[1], width: box[2] - box[0], height: 16, rx: node.isGroup ? 8 : 3, fill: palette.card, ...look });
        this.words(node.label, box[0] + 5, box[1] + 12, palette.ink);
      },
      words(label, x, y, colour) {
        add("text", { x, y, fill: colour, "font-size": 11, "font-family": "system-ui, 'DejaVu Sans', sans-serif" }).textContent = label;
      },
    };
  };

  function sizeOf(canvas) {
    return { width: canvas.clientWidth, height: canvas.clientHeight, turn, top: graphs.length > 1 ? 40 : 26 };
  }

  let kept = [], asked = 0;
  /** Draws at the next frame; while a large picture is being moved, the picture and not its thousands of lines. */
  function draw(moving = false) {
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(() => {
      const palette = PALETTES[dark.matches ? "dark" : "light"], ratio = devicePixelRatio || 1;
      stage.querySelectorAll("canvas").forEach((canvas, index) => {
        const view = sizeOf(canvas), context = canvas.getContext("2d"), pane = scene.panes[index], old = kept[index];
        if (moving && old && pane.links.length > MANY) {
          const scale = turn.k / old.turn.k;
          context.setTransform(1, 0, 0, 1, 0, 0);
          context.clearRect(0, 0, canvas.width, canvas.height);
          context.drawImage(old.picture, (turn.x - scale * old.turn.x) * ratio, (turn.y - scale * old.turn.y) * ratio, canvas.width * scale, canvas.height * scale);
          return;
        }
        canvas.width = view.width * ratio;
        canvas.height = view.height * ratio;
        context.scale(ratio, ratio);
        paint(onCanvas(context), pane, view, palette);
        if (pane.links.length > MANY) {
          const picture = document.createElement("canvas");
          Object.assign(picture, { width: canvas.width, height: canvas.height });
          picture.getContext("2d").drawImage(canvas, 0, 0);
          kept[index] = { picture, turn };
        } else kept[index] = null;
      });
      root.dataset.state = "drawn";
    });
  }

  /** All panes, as they are shown, as one SVG in light colours on white. */
  function picture() {
    const canvases = [...stage.querySelectorAll("canvas")], views = canvases.map(sizeOf);
    const width = d3.sum(views, (view) => view.width), height = views[0].height;
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [key, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height, role: "img" })) svg.setAttribute(key, value);
    svg.appendChild(document.createElementNS(svg.namespaceURI, "title")).textContent = described();
    const ground = svg.appendChild(document.createElementNS(svg.namespaceURI, "rect"));
    for (const [key, value] of Object.entries({ width, height, fill: "#fff" })) ground.setAttribute(key, value);
    views.forEach((view, index) => {
      const part = svg.appendChild(document.createElementNS(svg.namespaceURI, "svg"));
      for (const [key, value] of Object.entries({ x: index * view.width, width: view.width, height })) part.setAttribute(key, value);
      paint(inSvg(part), scene.panes[index], view, PALETTES.light);
      if (views.length > 1) inSvg(part).words(scene.panes[index].graph.title, 8, 14, PALETTES.light.ink);
    });
    return svg;
  }

  function described() {
    const said = scene.panes.map((pane) => `${pane.graph.title}: ${pane.links.length} edges between ${pane.nodes.size} nodes, from the input below to the metric above.`);
    return said.join(" ");
  }

  // Words beside the picture

  function element(name, values = {}, ...children) {
    const made = Object.assign(document.createElement(name), values);
    made.append(...children);
    return made;
  }

  const name = (pane, id) => pane.nodes.get(id)?.label ?? labelled(pane.graph, id);
  const into = (via) => (via ? `${READS[via] ?? via} of ` : "");
  function sentence(link, pane = scene.panes[0]) {
    const several = link.of.length > 1 ? ` (${link.of.length} edges)` : "";
    return `${name(pane, link.source)} → ${into(link.via)}${name(pane, link.target)}: ${number(link.weight)}${several}`;
  }

  function faithfulness(pane) {
    const { about, links } = pane.graph, shown = pane.edges.length, all = about.n_edges ?? links.length;
    const least = pane.edges.length ? Math.abs(pane.edges.at(-1).weight) : 0;
    const merged = pane.links.length < shown ? ` as ${pane.links.length.toLocaleString("en")} arrows` : "";
    const said = [`${shown.toLocaleString("en")} of ${all.toLocaleString("en")} edges (${percent(shown / all)}) are drawn${merged}, magnitude at least ${number(least)}.`];
    if (state.which === "all" && shown < state.n && state.connected) said.push(`They are those of the ${state.n.toLocaleString("en")} largest that lie on a path to the metric.`);
    const rows = (about.curve ?? []).filter((row) => row.by === "edges");
    const kept = (row) => `${rounded(row.faithfulness)} [${rounded(row.low)}, ${rounded(row.high)}]`;
    const tell = (row) => `${percent(row.share)} of the edges: ${kept(row)}`;
    const own = state.which === "circuit" ? about.curve?.find((row) => row.by === "circuit") : undefined;
    if (!rows.length && !own) return said.join(" ");
    if ([...rows, ...(own ? [own] : [])].every((row) => row.faithfulness === null)) said.push("Faithfulness is not given: the metric of the whole model cannot be told from the metric with no edge.");
    else if (own && own.n !== shown) said.push(`The circuit has ${own.n.toLocaleString("en")} edges and keeps ${kept(own)}; what these keep alone was not measured.`);
    else if (own) said.push(`They are the circuit, and keep ${kept(own)}.`);
    else if (state.which !== "all" && state.which !== "circuit") said.push("Faithfulness was measured for the largest edges, not for this selection.");
    else {
      const n = state.which === "circuit" ? about.size ?? shown : state.n;
      const exact = rows.find((row) => row.n === n), below = rows.findLast((row) => row.n < n), above = rows.find((row) => row.n > n);
      said.push(`Faithfulness on other pairs, ${exact ? tell(exact) : [below, above].filter(Boolean).map(tell).join("; ")}.`);
      const at = exact ?? below ?? above, random = (about.curve ?? []).filter((row) => row.by === "random" && row.n === at.n);
      if (random.length) said.push(`Random circuits of ${percent(at.share)}: ${rounded(d3.mean(random, (row) => row.faithfulness))}.`);
    }
    return said.join(" ");
  }

  function linkItem(pane, link, other, inside) {
    const press = element("button", { type: "button", textContent: labelled(pane.graph, other) });
    press.addEventListener("click", () => focus(shownAs(other) ?? other));
    const spread = Number.isFinite(link.raw.standard_error) ? ` ± ${number(link.raw.standard_error)}` : "";
    return element("li", {}, press, element("span", { className: "number", textContent: `${number(link.weight)}${spread}${inside.has(link.key) ? "" : " · not shown"}` }));
  }

  /** All that is known of a node: its name, which one writes, and its largest edges, also of those that are not shown. */
  function describe(id) {
    panel.replaceChildren();
    if (!id) {
      const { prompt, answer, probability } = graphs[0].about;
      if (answer) panel.append(element("h3", { textContent: "The first prompt" }), element("p", { textContent: `“${text(prompt, 300)}” goes on with “${text(answer, 40)}” (probability ${percent(probability)}).` }));
      panel.append(element("h3", { textContent: "No node is chosen" }), element("p", { className: "quiet", textContent: "Point at a node, find one, or go there with the arrow keys. A click or Enter pins it." }));
      return groupList();
    }
    const node = scene.nodes.get(id), pane = scene.panes.find((one) => one.nodes.has(id)) ?? scene.panes.find((one) => one.graph.nodes.has(id));
    const { graph } = pane, ids = node?.ids ?? [id], inside = new Set(pane.edges.map((link) => link.key));
    panel.append(element("h3", { textContent: node?.label ?? labelled(graph, id) }));
    if (node?.isGroup) panel.append(element("p", { textContent: ids.map((one) => labelled(graph, one)).join(", ") }));
    else {
      const input = element("input", { value: Object.hasOwn(state.labels, id) ? state.labels[id] : (graph.nodes.get(id).clerp ?? ""), maxLength: 200 });
      input.dataset.label = "";
      input.addEventListener("change", () => change((of) => (of.labels = { ...of.labels, [id]: input.value })));
      const pinned = state.pinned.includes(id), pin = element("button", { type: "button", textContent: pinned ? "Unpin" : "Pin" });
      pin.addEventListener("click", () => togglePin(id));
      panel.append(element("p", {}, element("label", {}, "Label ", input), " ", pin));
      panel.append(element("p", { className: "quiet", textContent: [id, graph.nodes.get(id).feature_type].filter(Boolean).map((one) => text(one, 200)).join(" · ") }));
    }
    const shared = /^a(\d+)\.h(\d+)$/.exec(base(graph, id)), group = graph.about.group ?? 1;
    const key = shared && group > 1 ? `a${shared[1]}.kv${Math.floor(shared[2] / group)}${id.slice(base(graph, id).length)}` : null;
    const inputs = graph.ranked.filter((link) => ids.includes(link.target) || link.target === key);
    const order = ([via]) => "qkvg".indexOf(via || "?");
    for (const [via, some] of d3.sort(d3.group(inputs, (link) => link.via), order)) {
      const title = via ? `Into its ${READS[via]?.slice(2) ?? via}${some[0].target === key ? `, which heads ${owners(graph, key).map(headOf).join(", ")} share` : ""}` : "Into it";
      panel.append(element("h4", { textContent: title }), element("ul", {}, ...some.slice(0, 6).map((link) => linkItem(pane, link, link.source, inside))));
    }
    const out = graph.ranked.filter((link) => ids.includes(link.source));
    if (out.length) panel.append(element("h4", { textContent: "Out of it" }), element("ul", {}, ...out.slice(0, 8).map((link) => linkItem(pane, link, link.target, inside))));
    if (!node?.isGroup) panel.append(...attention(graph, id));
    groupList();
  }

  const SIDES = { key: "what its key reads", query: "what its query reads" };
  /** Where a head looks in the first prompt, cell by cell, and which parts of query and key make it look there. */
  function attention(graph, id) {
    const kept = graph.about.attention ?? {}, found = Object.hasOwn(kept, base(graph, id)) ? kept[base(graph, id)] : null;
    if (!found) return [];
    const bytes = Uint8Array.from(atob(found.pattern), (one) => one.charCodeAt(0)), size = (Math.sqrt(8 * bytes.length + 1) - 1) / 2;
    const share = (query, key) => bytes[(query * (query + 1)) / 2 + key] / 255, tokens = graph.raw.metadata?.prompt_tokens ?? [];
    const token = (at) => `${at}${tokens.length === size ? ` “${text(tokens[at], 20).replaceAll(" ", "·")}”` : ""}`;
    const canvas = element("canvas", { className: "pattern", width: size, height: size, tabIndex: 0 }), cell = element("p", { className: "cell" });
    const pen = canvas.getContext("2d");
    canvas.setAttribute("role", "img");
    cell.setAttribute("aria-live", "polite");
    let at = [found.query, found.key];
    const told = (query, key) => `Query ${token(query)} gives key ${token(key)} ${percent(share(query, key))} of its attention.`;
    function go(query, key) {
      at = [Math.max(0, Math.min(size - 1, query)), 0];
      at[1] = Math.max(0, Math.min(at[0], key));
      for (let row = 0; row < size; row++)
        for (let column = 0; column <= row; column++) {
          pen.fillStyle = row === at[0] && column === at[1] ? PALETTES.light.lowers : d3.interpolateViridis(share(row, column));
          pen.fillRect(column, row, 1, 1);
        }
      cell.textContent = told(...at);
      canvas.setAttribute("aria-label", `Attention pattern, queries down and keys across. Arrow keys move. ${cell.textContent}`);
    }
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      go(Math.floor(((event.clientY - box.top) / box.height) * size), Math.floor(((event.clientX - box.left) / box.width) * size));
    });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!move) return;
      event.preventDefault();
      go(at[0] + move[0], at[1] + move[1]);
    });
    go(...at);
    const why = d3.group(found.why ?? [], (row) => row.side, (row) => row.by), made = [element("h4", { textContent: "Where it looks in the first prompt" }), canvas, cell];
    const over = Number.isFinite(found.advantage) ? `, whose score is ${number(found.advantage)} above the mean of the other keys` : "";
    if (why.size) made.push(element("h4", { textContent: `Why query ${token(found.query)} looks at key ${token(found.key)}${over}` }));
    for (const [side, kinds] of why)
      for (const [by, rows] of kinds) {
        const items = rows.map((row) => element("li", {}, element("span", { textContent: row.part === "rest" ? "all else" : by === "dimension" ? `dimension ${row.part}` : labelled(graph, row.part) }), element("span", { className: "number", textContent: number(row.value) })));
        made.push(element("p", { className: "quiet", textContent: `${SIDES[side] ?? text(side)}, by ${text(by)}` }), element("ul", {}, ...items));
      }
    return made;
  }

  function groupList() {
    const made = element("input", { placeholder: "name", maxLength: 100 }), press = element("button", { type: "button", textContent: "Group the pinned", disabled: state.pinned.length < 2 });
    made.dataset.groupName = "";
    made.setAttribute("aria-label", "Name of a new group");
    press.dataset.do = "group";
    press.addEventListener("click", () => groupPinned(made.value));
    panel.append(element("h4", { textContent: "Groups by hand" }), element("p", {}, made, " ", press));
    const items = state.groups.map((group, index) => {
      const input = element("input", { value: group.name, maxLength: 100 }), end = element("button", { type: "button", textContent: "Ungroup" });
      input.setAttribute("aria-label", `Name of group ${index + 1}`);
      input.addEventListener("change", () => change((of) => (of.groups[index].name = input.value)));
      end.setAttribute("aria-label", `Ungroup ${text(group.name)}`);
      end.addEventListener("click", () => change((of) => of.groups.splice(index, 1)));
      return element("li", {}, input, element("span", { className: "number", textContent: `${group.ids.length} nodes` }), end);
    });
    panel.append(element("ul", {}, ...items));
  }

  function groupPinned(called) {
    if (state.pinned.length < 2) return say("Pin two nodes or more to group them.", true);
    change((of) => {
      const ids = of.pinned, groups = of.groups.map((group) => ({ ...group, ids: group.ids.filter((id) => !ids.includes(id)) }));
      Object.assign(of, { groups: [...groups.filter((group) => group.ids.length), { name: called || `group ${of.groups.length + 1}`, ids }], pinned: [], group: "hand" });
    });
    say("Grouped.");
  }

  function table(heads, rows) {
    const line = (cells, of) => element("tr", {}, ...cells.map((cell) => element(of, of === "th" ? { scope: "col", textContent: cell } : { textContent: cell })));
    return element("table", { className: "plain" }, element("thead", {}, line(heads, "th")), element("tbody", {}, ...rows.map((cells) => line(cells, "td"))));
  }

  const truth = (value) => (value === true ? "yes" : value === false ? "no" : "");
  function tables() {
    const into = find("table").querySelector(".wide-table"), parts = [];
    for (const pane of find("table").open ? scene.panes : []) {
      const rows = pane.links.slice(0, MOST_ROWS).map((link) => [name(pane, link.source), name(pane, link.target), READS[link.via]?.slice(2) ?? text(link.via), number(link.weight),
        link.of.length > 1 ? `${link.of.length} edges` : Number.isFinite(link.raw.standard_error) ? `± ${number(link.raw.standard_error)}` : "",
        Number.isFinite(link.raw.inclusion) ? percent(link.raw.inclusion) : "", truth(link.raw.core)]);
      parts.push(element("p", { textContent: `${pane.graph.title}: ${pane.links.length > MOST_ROWS ? `the first ${MOST_ROWS} of ` : ""}${pane.links.length} edges, the largest first.` }), table(["from", "into", "reads as", "score", "spread", "in bootstraps", "core"], rows));
    }
    into.replaceChildren(...parts);
  }

  function difference() {
    const box = find("difference"), [one, other] = scene.panes;
    box.hidden = !other;
    if (!other) return;
    const own = new Map(one.links.map((link) => [link.key, link])), theirs = new Map(other.links.map((link) => [link.key, link]));
    const every = [...new Map([...own, ...theirs]).values()], both = every.filter((link) => own.has(link.key) && theirs.has(link.key));
    const only = (pane, than) => [...pane.nodes.values()].filter((node) => !than.nodes.has(node.id)).map((node) => node.label).sort(d3.ascending).join(", ") || "none";
    const weigh = (link) => Math.abs((own.get(link.key)?.weight ?? 0) / one.most - (theirs.get(link.key)?.weight ?? 0) / other.most);
    const rows = every.sort((first, second) => weigh(second) - weigh(first)).slice(0, MOST_ROWS).map((link) => {
      const [first, second] = [own.get(link.key), theirs.get(link.key)], pane = first ? one : other;
      return [name(pane, link.source), name(pane, link.target), READS[link.via]?.slice(2) ?? "", first ? number(first.weight) : "–", second ? number(second.weight) : "–", first && second ? "both" : first ? "first only" : "second only"];
    });
    const said = `${both.length} edges are in both, ${own.size - both.length} only in the first, ${theirs.size - both.length} only in the second: they share ${percent(both.length / (every.length || 1))} of the edges of either.`;
    box.querySelector(".wide-table").replaceChildren(element("p", { textContent: said }), element("p", { textContent: `Nodes only in the first: ${only(one, other)}.` }), element("p", { textContent: `Nodes only in the second: ${only(other, one)}.` }),
      table(["from", "into", "reads as", "first", "second", "in"], rows));
  }

  function legend() {
    const palette = PALETTES[dark.matches ? "dark" : "light"];
    const looks = scene.panes.length > 1 ? [["only in the first", palette.raises], ["only in the second", palette.lowers], ["in both", palette.other]]
      : state.colour === "reads" ? [...Object.entries(READS).map(([via, what]) => [`into ${what}`, palette[via]]), ["into an MLP or the logits", palette.other]]
      : state.colour === "core" ? [["core", palette.core], ["undecided or contingent", palette.contingent], ["not judged", palette.other]]
      : [["raises the metric", palette.raises], ["lowers it", palette.lowers, true]];
    if (!looks.some(([, , dashed]) => dashed)) looks.push(["dashed: lowers the metric", palette.other, true]);
    if (scene.panes.some((pane) => pane.shared.length)) looks.push(["dotted: heads that share a key and value", palette.quiet, true]);
    find("legend").replaceChildren(...looks.map(([what, colour, dashed]) => {
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = svg.appendChild(document.createElementNS(svg.namespaceURI, "line"));
      for (const [key, value] of Object.entries({ x1: 0, x2: "100%", y1: "50%", y2: "50%", stroke: colour, "stroke-width": 4, "stroke-dasharray": dashed ? "5 4" : "" })) line.setAttribute(key, value);
      svg.setAttribute("aria-hidden", "true");
      return element("li", {}, svg, what);
    }), element("li", { textContent: `width: magnitude${scene.panes.some((pane) => pane.links.length > WIDE) ? `, of the ${WIDE} largest` : ""}` }));
  }

  // Everything again after a change

  const onRange = (n) => Math.round((1000 * Math.log(n)) / Math.log(Math.max(most(), 2)));
  const most = () => d3.max(graphs, (graph) => graph.links.length) || 1;
  function refresh() {
    const panes = graphs.map(paneOf);
    if (panes.length > 1) panes.forEach((pane, index) => (pane.others = new Set(panes[1 - index].links.map((link) => link.key))));
    layOut(panes);
    if (focused && !scene.nodes.has(focused) && !graphs.some((graph) => graph.nodes.has(focused))) focused = null;
    if (hovered && !scene.nodes.has(hovered)) hovered = null;
    find("number").value = state.n;
    find("number").max = most();
    find("range").value = onRange(state.n);
    find("range").setAttribute("aria-valuetext", `${state.n} edges`);
    find("size").value = String(state.n);
    if (find("size").selectedIndex < 0) find("size").value = "";
    for (const key of ["which", "colour", "group"]) find(key).value = state[key];
    find("connected").checked = state.connected;
    find("positions").checked = state.positions;
    for (const [key, list] of [["undo", past], ["redo", future], ["unpin", state.pinned]]) root.querySelector(`[data-do=${key}]`).disabled = !list.length;
    find("faithfulness").textContent = panes.map((pane, index) => (panes.length > 1 ? ["First: ", "Second: "][index] : "") + faithfulness(pane)).join(" ");
    stage.setAttribute("aria-label", described());
    const writing = panel.contains(document.activeElement);
    describe(focused ?? hovered);
    if (writing) panel.querySelector("[data-label]")?.focus();
    tables();
    difference();
    legend();
    search(false);
    draw();
  }

  /** Begins with one graph, or with two beside each other. */
  function show(some) {
    graphs = some;
    state = begun(graphs[0]);
    [past, future, turn, focused, hovered, kept] = [[], [], d3.zoomIdentity, null, null, []];
    stage.replaceChildren(...graphs.map((graph) => element("div", {}, ...(graphs.length > 1 ? [element("p", { textContent: graph.title })] : []), element("canvas"))));
    for (const canvas of stage.querySelectorAll("canvas")) listen(canvas);
    const rows = (graphs[0].about.curve ?? []).filter((row) => row.by === "edges");
    find("size").replaceChildren(element("option", { value: "", textContent: rows.length ? "choose" : "none" }), ...rows.map((row) => element("option", { value: row.n, textContent: `${percent(row.share)}: ${row.n.toLocaleString("en")}`, disabled: row.n > graphs[0].links.length })));
    for (const option of find("which").options) option.disabled = !graphs.some((graph) => graph.links.some(WHICH[option.value]));
    find("colour").querySelector("[value=core]").disabled = !graphs.some((graph) => graph.links.some((link) => typeof link.raw.core === "boolean"));
    find("size").parentElement.hidden = !rows.length;
    find("connected").parentElement.hidden = !graphs[0].about.outputs;
    find("positions-label").hidden = new Set([...graphs[0].nodes.values()].map((node) => node.ctx_idx)).size < 2;
    root.querySelector("[data-do=single]").hidden = graphs.length < 2;
    refresh();
  }

  // Pointer, keys and buttons

  const mover = d3.zoom().scaleExtent([0.5, 60]).filter((event) => {
    if (event.type === "wheel") return event.ctrlKey || event.metaKey || document.activeElement === stage;
    return event.type.startsWith("touch") ? event.touches.length > 1 : !event.button;
  }).on("zoom", (event) => {
    if (event.transform === turn) return;
    turn = event.transform;
    for (const canvas of stage.querySelectorAll("canvas")) canvas.__zoom = turn; // both panes move together
    draw(Boolean(event.sourceEvent));
  }).on("end", () => draw());

  function listen(canvas) {
    d3.select(canvas).call(mover).on("dblclick.zoom", null);
    canvas.addEventListener("pointermove", (event) => !event.buttons && point(event, canvas));
    canvas.addEventListener("pointerleave", () => hover(null));
    canvas.addEventListener("click", (event) => {
      point(event, canvas);
      if (!hovered) return (focused = null), hover(null);
      focused = hovered;
      for (const id of scene.nodes.get(hovered).ids.slice(0, 1)) togglePin(id);
    });
  }

  function zoom(act, ...values) {
    const canvas = stage.querySelector("canvas");
    d3.select(canvas).call(mover[act], ...values);
    draw();
  }

  function point(event, canvas) {
    const box = canvas.getBoundingClientRect(), mouse = [event.clientX - box.left, event.clientY - box.top];
    const pane = scene.panes[[...stage.querySelectorAll("canvas")].indexOf(canvas)], view = sizeOf(canvas);
    let nearest = null, least = 16;
    for (const id of pane.nodes.keys()) {
      const [x, y] = place(id, view), far = Math.hypot((x - mouse[0]) / 1.6, y - mouse[1]);
      if (far < least) [nearest, least] = [id, far];
    }
    hover(nearest);
    const before = edge;
    edge = null;
    if (!nearest && pane.links.length <= MANY) {
      ruler.lineWidth = 8;
      edge = pane.links.find((link) => {
        const path = new Path2D();
        curve(path, place(link.source, view), place(link.target, view));
        return ruler.isPointInStroke(path, ...mouse);
      });
    }
    canvas.title = edge ? sentence(edge, pane) : "";
    if (edge && edge !== before) say(sentence(edge, pane));
  }

  function hover(id) {
    if (id === hovered) return;
    hovered = id;
    describe(focused && !id ? focused : id ?? focused);
    draw();
  }

  /** Goes to a node, also to one that is not among the edges shown. */
  function focus(id) {
    focused = id;
    hovered = null;
    describe(id);
    if (scene.nodes.has(id)) {
      const canvas = stage.querySelector("canvas"), view = sizeOf(canvas), [x, y] = place(id, view);
      if (x < 5 || y < 5 || x > view.width - 5 || y > view.height - 5) zoom("translateBy", (view.width / 2 - x) / turn.k, (view.height / 2 - y) / turn.k);
    }
    say(scene.nodes.has(id) ? spoken(id) : `${labelled(graphs.find((graph) => graph.nodes.has(id)), id)} is not among the edges shown.`);
    draw();
  }

  function spoken(id) {
    const pane = scene.panes.find((one) => one.nodes.has(id)), ends = (side) => pane.links.filter((link) => link[side] === id);
    const [first] = ends("target"), [out] = ends("source");
    return `${scene.nodes.get(id).label}: ${ends("target").length} edges in, ${ends("source").length} out.${first ? ` Largest in: ${sentence(first, pane)}.` : ""}${out ? ` Largest out: ${sentence(out, pane)}.` : ""}`;
  }

  function togglePin(id) {
    const pinned = state.pinned.includes(id);
    change((of) => (of.pinned = pinned ? of.pinned.filter((one) => one !== id) : [...of.pinned, id]));
    say(`${labelled(graphs.find((graph) => graph.nodes.has(id)), id)} is ${pinned ? "unpinned" : "pinned"}.`);
  }

  function search(go = true) {
    const asked = find("find").value.trim().toLowerCase();
    const head = /^\D*(\d+)\D+(\d+)$/.exec(asked), named = head && [`a${head[1]}.h${head[2]}`, `head:${head[1]}.${head[2]}`, `neuron:${head[1]}.${head[2]}`];
    const those = (fits) => graphs.flatMap((graph) => [...graph.nodes.keys()].filter((id) => fits(graph, id)));
    const exact = named ? those((graph, id) => named.includes(base(graph, id))) : [];
    const found = exact.length || !asked ? exact : those((graph, id) => `${id}\n${labelled(graph, id)}`.toLowerCase().includes(asked));
    matches = new Set(found.map((id) => shownAs(id) ?? id));
    if (!go) return;
    say(asked ? `${new Set(found).size} found.` : "");
    draw();
  }

  /** The next node in a direction: along its row, or the nearest of the next row. */
  function step(right, up) {
    const all = [...scene.nodes.values()];
    if (!all.length) return;
    if (!scene.nodes.has(focused)) return focus(d3.greatest(all, (node) => node.row).id);
    const here = scene.nodes.get(focused), [x] = scene.at.get(focused);
    const along = all.filter((node) => node.row === here.row).sort((one, other) => scene.at.get(one.id)[0] - scene.at.get(other.id)[0]);
    if (right) return focus(along[Math.min(Math.max(along.indexOf(here) + right, 0), along.length - 1)].id);
    const row = scene.rows[scene.rows.indexOf(here.row) + up];
    if (row !== undefined) focus(d3.least(all.filter((node) => node.row === row), (node) => Math.abs(scene.at.get(node.id)[0] - x)).id);
  }

  const fewer = (by) => change((of) => (of.n = Math.max(1, Math.min(most(), Math.round(of.n * by + Math.sign(by - 1))))));
  function download(what, ending, type) {
    const link = element("a", { href: URL.createObjectURL(what instanceof Blob ? what : new Blob([what], { type })), download: `${text(graphs[0].raw.metadata?.slug || "circuit").replace(/[^\w-]+/g, "-")}${ending}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    say(`Saved ${link.download}.`);
  }

  /** The file as it was opened, with labels, pins, groups and the view. */
  function saved() {
    const { pinned, groups, labels, ...view } = state, { raw } = graphs[0];
    const nodes = raw.nodes.map((node) => (Object.hasOwn(labels, node.node_id) ? { ...node, clerp: labels[node.node_id] } : node));
    return { ...raw, qParams: { ...raw.qParams, pinnedIds: pinned, supernodes: groups.map(({ name, ids }) => [name, ...ids]), sink_lens: view }, nodes };
  }

  function bitmap() {
    const canvases = [...stage.querySelectorAll("canvas")], views = canvases.map(sizeOf), scale = 3;
    const canvas = element("canvas", { width: scale * d3.sum(views, (view) => view.width), height: scale * views[0].height }), context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    views.forEach((view, index) => {
      context.setTransform(scale, 0, 0, scale, scale * d3.sum(views.slice(0, index), (one) => one.width), 0);
      paint(onCanvas(context), scene.panes[index], view, PALETTES.light);
    });
    canvas.toBlob((blob) => download(blob, ".png"));
  }

  let opens = "open";
  const choose = (what) => {
    opens = what;
    find("file").value = "";
    find("file").click();
  };
  find("file").addEventListener("change", async () => {
    const [file] = find("file").files;
    if (!file) return;
    try {
      const graph = read(JSON.parse(await file.text()));
      show(opens === "open" ? [graph] : [graphs[0], graph]);
      say(`${graph.title}: opened.`);
    } catch (error) {
      say(`${text(file.name)} cannot be shown (${text(error.message, 120)}); need Neuronpedia's graph JSON.`, true);
    }
  });

  const DO = {
    in: () => zoom("scaleBy", 1.5),
    out: () => zoom("scaleBy", 1 / 1.5),
    fit: () => zoom("transform", d3.zoomIdentity),
    undo: () => goTo(past, future, "Taken back."),
    redo: () => goTo(future, past, "Done again."),
    unpin: () => change((of) => (of.pinned = [])),
    save: () => download(JSON.stringify(saved()), ".graph.json", "application/json"),
    open: () => choose("open"),
    compare: () => choose("compare"),
    single: () => show(graphs.slice(0, 1)),
    svg: () => download(new XMLSerializer().serializeToString(picture()), ".svg", "image/svg+xml"),
    png: bitmap,
    print() {
      document.documentElement.classList.add("alone");
      print();
    },
  };
  for (const [key, act] of Object.entries(DO)) root.querySelector(`[data-do=${key}]`).addEventListener("click", act);
  addEventListener("beforeprint", () => find("printed").replaceChildren(picture(), element("p", { textContent: find("faithfulness").textContent })));
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("alone");
    find("printed").replaceChildren();
  });

  const KEYS = {
    ArrowLeft: () => step(-1, 0), ArrowRight: () => step(1, 0), ArrowUp: () => step(0, 1), ArrowDown: () => step(0, -1),
    Enter: () => focused && scene.nodes.get(focused)?.ids.slice(0, 1).forEach(togglePin),
    "+": DO.in, "=": DO.in, "-": DO.out, 0: DO.fit, "[": () => fewer(1 / 1.25), "]": () => fewer(1.25),
    "/": () => find("find").focus(),
    l: () => (focused ?? hovered) && (describe(focused ?? hovered), panel.querySelector("[data-label]")?.focus()),
    g: () => groupPinned(""),
    Escape: () => ((focused = null), describe(null), draw()),
  };
  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = event.shiftKey && { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
    const act = moves ? () => zoom("translateBy", moves[0] / turn.k, moves[1] / turn.k) : KEYS[event.key] ?? KEYS[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  });
  root.addEventListener("keydown", (event) => {
    const act = (event.ctrlKey || event.metaKey) && { z: event.shiftKey ? DO.redo : DO.undo, y: DO.redo, s: DO.save }[event.key.toLowerCase()];
    if (!act || (event.target.matches("input:not([type=range], [type=checkbox])") && event.key !== "s")) return;
    event.preventDefault();
    act();
  });
  find("find").addEventListener("input", () => search());
  find("find").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !matches.size) return;
    const some = [...matches];
    focus(some[(some.indexOf(focused) + 1) % some.length]);
  });
  const resize = (n) => (of) => Object.assign(of, { n }, of.which === "circuit" && { which: "all" }); // a circuit has its own size
  find("number").addEventListener("change", () => change(resize(Math.max(1, Math.min(most(), Math.round(Number(find("number").value)) || 1)))));
  let sliding = false; // a whole drag is one change
  find("range").addEventListener("input", () => {
    const to = Number(find("range").value), near = Math.round(Math.max(most(), 2) ** (to / 1000));
    const n = Math.max(1, Math.min(most(), near === state.n ? near + Math.sign(to - onRange(near)) : near)); // at least one
    sliding ? refresh((state.n = n)) : change(resize(n));
    sliding = true;
  });
  find("range").addEventListener("change", () => (sliding = false));
  find("size").addEventListener("change", () => find("size").value && change(resize(Number(find("size").value))));
  for (const key of ["which", "colour", "group"]) find(key).addEventListener("change", () => change((of) => (of[key] = find(key).value)));
  for (const key of ["connected", "positions"]) find(key).addEventListener("change", () => change((of) => (of[key] = find(key).checked)));
  find("table").addEventListener("toggle", tables);
  dark.addEventListener("change", () => (legend(), draw()));
  root.dataset.state = "opened";
  for (const one of packed) graphs.push(read(JSON.parse(await inflate(one))));
  show(graphs);
  new ResizeObserver(() => draw()).observe(stage);
};
