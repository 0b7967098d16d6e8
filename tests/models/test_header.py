"""The headers of a folder say what the model is, so that what it cannot do is refused before its weights are read."""

import pytest
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.models import inputs, load
from sink_lens.models.header import read_folder
from sink_lens.models.load import wrap
from sink_lens.models.sites import sites_of
from sink_lens.models.tiny import MORE_FAMILIES, TINY_FAMILIES, tiny, tiny_tokenizer
from sink_lens.patching import command as patch_command

SIZES = ("n_layers", "n_heads", "n_kv_heads", "d_model", "d_head", "d_mlp", "d_vocab", "n_context")
REPRESENTATIVES = ("llama", "gpt2", "gpt_neox", "phi3")
FAMILIES = [
    one if one in REPRESENTATIVES else pytest.param(one, marks=pytest.mark.exhaustive)
    for one in (*TINY_FAMILIES, *MORE_FAMILIES)
]
RANDOM = ["MODEL", "--tokens", "random", "--length", 24, "--device", "cpu"]
PATCH = ["patch", "MODEL", "--clean", "a b c", "--corrupted", "a d c", "--device", "cpu"]
SWEEP = '[tokens]\nkind = "random"\nlength = 10\n[[metrics]]\nname = "norm"\nlayer = {layer}\n[[edits]]\n{edit}\n'
REFUSED = {
    "trace, a position": (["trace", *RANDOM, "--target-position", 30], "need one from 1 to 22"),
    "trace, more text than there is": (["trace", "MODEL", "--sequences", 10**6], "the text has 300,000 bytes"),
    "trace, a floor": (["trace", *RANDOM, "--floor", "nope=1"], "nope"),
    "isolate, a position": (["isolate", *RANDOM, "--target-position", 99], "need one from 1 to 22"),
    "isolate, a layer": (["isolate", *RANDOM, "--layers", 9], "layer 9 does not exist; need 0 to 2"),
    "amplify, a layer": (["amplify", *RANDOM, "--layers", 9], "layer 9 does not exist; need 0 to 2"),
    "ablate, over the context": (["ablate", *RANDOM, "--length", 5000], "takes at most"),
    "card, over the context": (["card", *RANDOM, "--length", 5000], "takes at most"),
    "sweep, a site": (["sweep", "SITE.toml", "--model", "MODEL"], "heart"),
    "sweep, a layer": (["sweep", "LAYER.toml", "--model", "MODEL"], "9"),
    "sweep, a position": (["sweep", "POSITION.toml", "--model", "MODEL"], "10"),
    "sweep, a layer of a metric": (["sweep", "METRIC.toml", "--model", "MODEL"], "9"),
    "patch, a site": ([*PATCH, "--site", "heart"], "heart"),
    "patch, a layer": ([*PATCH, "--layers", 9], "9 does not exist; need 0 to 2"),
    "patch, a position": ([*PATCH, "--positions", 99], "99 does not exist"),
    "patch, an axis": ([*PATCH, "--by", "layer,head"], "is not possible"),
    "patch, equal prompts": ([*PATCH[:4], "--corrupted", "a b c"], "have the same tokens"),
    "circuit, pairs": (["circuit", "MODEL", "--task", "file", "--pairs-file", "SITE.toml"], "is no pair"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_have_the_sizes_and_the_sites_of_the_model(family, tmp_path):
    model = tiny(family)
    model.save_pretrained(tmp_path)
    header = read_folder(tmp_path)
    if header is None:  # experts, or a mixer: the headers do not say it all
        return
    lens = wrap(model)
    assert {name: getattr(header, name) for name in SIZES} == {name: getattr(lens, name) for name in SIZES}
    assert sites_of(header.family) == sites_of(lens.family)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    tiny("llama").save_pretrained(folder / "MODEL")
    tiny_tokenizer().save_pretrained(folder / "MODEL")
    for name, edit, layer in (
        ("SITE", 'site = "heart"', 0),
        ("LAYER", 'site = "z"\nlayers = 9', 0),
        ("POSITION", 'site = "z"\npositions = 10', 0),
        ("METRIC", 'site = "z"', 9),
    ):
        (folder / f"{name}.toml").write_text(SWEEP.format(edit=edit, layer=layer))
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_headers_say_is_refused_before_the_weights_are_read(name, given, tmp_path, monkeypatch):
    def loads(*args, **options):
        pytest.fail("the weights were read")

    monkeypatch.setattr(inputs, "load", loads)
    monkeypatch.setattr(load, "load", loads)
    monkeypatch.setattr(patch_command, "load", loads)
    monkeypatch.chdir(tmp_path)
    command, said = REFUSED[name]
    words = [str(given / word) if word == "MODEL" or str(word).endswith(".toml") else str(word) for word in command]
    result = CliRunner(env={"COLUMNS": "400", "TERM": "dumb"}).invoke(cli.app, [*words, "--quiet"])
    assert result.exit_code == 2, result.output
    assert said in result.output
