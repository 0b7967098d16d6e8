"""What the model says: ranks and probabilities as the plain model gives them, also of answers of several tokens."""

import pytest
import torch
from lenses import lens_of, speaking

from sink_lens import answers, edits, load
from sink_lens.errors import InputError
from tests.tiny_families import BY_LAYER_FAMILIES, LATENT_FAMILIES, MORE_FAMILIES, TINY_FAMILIES


@pytest.mark.parametrize(
    "family", [*TINY_FAMILIES, *MORE_FAMILIES, *BY_LAYER_FAMILIES, *LATENT_FAMILIES]
)
def test_ranks_and_probabilities_are_those_of_the_plain_model(family):
    lens = lens_of(family)
    tokens = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = lens.plain(tokens, use_cache=False).logits[:, -1].double()
    found = answers(lens, tokens, [5, 250], top=4)
    for sequence, right in enumerate((5, 250)):
        rows = found[found["sequence"] == sequence]
        assert rows["token_id"].tolist()[:4] == logits[sequence].topk(4).indices.tolist()
        assert rows["rank"].tolist()[:4] == [0, 1, 2, 3]
        own = rows[rows["is_answer"]].iloc[0]
        assert (own["token_id"], own["rank"]) == (
            right,
            int((logits[sequence] > logits[sequence, right]).sum()),
        )
        chosen = logits[sequence, rows["token_id"].tolist()]
        assert rows["logit"].tolist() == pytest.approx(chosen.tolist(), abs=1e-5)
        shares = logits[sequence].softmax(-1)[rows["token_id"].tolist()]
        assert rows["probability"].tolist() == pytest.approx(shares.tolist(), rel=1e-4)


def test_an_answer_of_several_tokens_is_scored_token_by_token_behind_those_before():
    lens, prompt = speaking(), "the cat and the"
    found = answers(lens, prompt, " dogs", top=1)
    ids = lens.tokenizer(prompt + " dogs", add_special_tokens=False)["input_ids"]
    own = found[found["is_answer"]]
    assert len(own) > 1
    assert own["token_id"].tolist() == ids[-len(own) :]
    with torch.no_grad():
        shares = lens.plain(torch.tensor([ids]), use_cache=False).logits[0].double().softmax(-1)
    expected = [
        float(shares[len(ids) - len(own) - 1 + step, ids[len(ids) - len(own) + step]])
        for step in own["step"]
    ]
    assert own["probability"].tolist() == pytest.approx(expected, rel=1e-4)


def test_prompts_of_other_lengths_edits_and_no_answer():
    lens = speaking()
    both = answers(lens, ["the cat and the", "the dog"], top=3)
    alone = answers(lens, "the dog", top=3)
    assert both[both["sequence"] == 1]["token_id"].tolist() == alone["token_id"].tolist()
    assert not both["is_answer"].any()
    edited = answers(lens, "the dog", edits=edits.zero("final"), top=3)
    assert edited["probability"].tolist() == pytest.approx(
        [1 / 300] * 3, rel=1e-5
    )  # all logits are 0


def test_what_is_no_answer_is_refused():
    lens = speaking()
    with pytest.raises(InputError, match="the 0 likeliest tokens were asked for; need at least 1"):
        answers(lens, "the cat", top=0)
    with pytest.raises(
        InputError, match="there are 3 answers for 1 prompts; need one, or one for each"
    ):
        answers(lens, "the cat", [4, 5, 6])
    with pytest.raises(InputError, match="the answer is the id 300; need 0 to 299"):
        answers(lens, "the cat", 300)
    with pytest.raises(InputError, match="text was given and the model has no tokenizer"):
        answers(load(lens_of().plain), "the cat")
