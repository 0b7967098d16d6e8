from functools import partial
from types import SimpleNamespace

import pytest
import torch
from prompt_pairs import as_llama_2

from analyses.tasks import (
    Example,
    agreement,
    answer_examples,
    batches,
    genres,
    pad_prompts,
    questions,
)
from sink_lens.errors import InputError
from sink_lens.models.tiny import tiny_tokenizer
from tests.tiny_families import tiny

TEXTS = {
    name: [" ".join(f"{name}{n}w{i}" for i in range(60)) for n in range(6)] + ["too short"]
    for name in ("news", "religion", "science", "fiction")
}
TASKS = {"agreement": agreement, "questions": questions, "genres": partial(genres, texts=TEXTS)}


def made(name, *, seed=0, **sizes):
    draw = torch.Generator().manual_seed(seed)
    return TASKS[name](**{"train": 200, "held_out": 100} | sizes, generator=draw)


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("agreement", "The the is are near behind beside in front of next to opposite"),
        ("questions", "has the Who Answer"),
        ("genres", "Genre news religion science fiction"),
    ],
)
def test_held_out_prompts_share_no_word_with_training_and_answers_are_as_likely_as_another(
    name, shared
):
    task = made(name)
    train, held_out = (
        {word.strip(".?:,") for one in part for word in (one.prompt + one.answer).split()}
        - {*shared.split()}
        for part in (task.train, task.held_out)
    )
    assert train.isdisjoint(held_out)
    assert len(held_out) >= 10
    places = [one.choices.index(one.answer) for one in (*task.train, *task.held_out)]
    counts = torch.bincount(torch.tensor(places), minlength=len(task.train[0].choices)) / len(
        places
    )
    assert (counts - 1 / len(counts)).abs().max() < 0.1
    assert made(name).held_out == task.held_out
    assert made(name, seed=1).held_out != task.held_out


def test_the_right_answers_are_right():
    for one in made("agreement").held_out:
        assert one.answer == (" are" if one.prompt.split()[1].endswith("s") else " is")
    misleading = [
        one
        for one in made("agreement").held_out
        if one.prompt.endswith("s") != (one.answer == " are")
    ]
    assert 30 < len(misleading) < 70  # of 100: the noun between has the other number in half
    for one in made("questions").held_out:
        told, asked = one.prompt.split(" Who has the ")
        thing = asked.split("?")[0]
        assert f"{one.answer.strip()} has the {thing}." in told
    for one in made("genres").held_out:
        assert one.prompt.startswith(one.answer.strip())
        assert len(one.prompt.split()) == 17


def test_only_answers_have_labels_and_padding_is_masked():
    tokenizer = tiny_tokenizer(adds_bos=True)
    pairs = [("a", " bc"), ("a longer prompt", " b")]
    batch = pad_prompts(pairs, tokenizer)
    for row, (prompt, answer) in enumerate(pairs):
        n = int(batch["attention_mask"][row].sum())
        whole = batch["input_ids"][row, :n].tolist()
        assert (
            whole
            == tokenizer(prompt)["input_ids"]
            + tokenizer(answer, add_special_tokens=False)["input_ids"]
        )
        label = batch["labels"][row][batch["labels"][row] != -100]
        assert tokenizer.decode(label) == answer
        assert (batch["labels"][row, n:] == -100).all()


@pytest.mark.parametrize("letters", [False, True])
def test_loss_and_right_are_those_of_one_sequence_at_a_time(letters):
    tokenizer, model = tiny_tokenizer(), tiny("llama")
    examples = made("questions", held_out=7).held_out
    if letters:  # choices of one token each, which are read from one sequence
        examples = [
            Example(prompt=f"x{letter}", answer="b", choices=("a", "b", "c")) for letter in "defgh"
        ]
    found = answer_examples(model, tokenizer, examples, size=5)
    for one, row in zip(examples, found.itertuples(), strict=True):
        slow = {}
        for choice in one.choices:
            before, after = (tokenizer(text)["input_ids"] for text in (one.prompt, choice))
            logits = model(torch.tensor([before + after])).logits[0].log_softmax(-1)
            slow[choice] = -sum(
                logits[len(before) + i - 1, token].item() for i, token in enumerate(after)
            )
        assert row.loss == pytest.approx(slow[one.answer], abs=1e-4)
        assert row.right == (min(slow, key=slow.get) == one.answer)
    (batch,) = batches(examples, tokenizer, size=7)
    n_tokens = [len(tokenizer(one.answer)["input_ids"]) for one in examples]
    mean = sum(found["loss"]) / sum(n_tokens)
    assert model(**batch).loss.item() == pytest.approx(mean, abs=1e-4)


def test_a_model_that_knows_nothing_is_wrong():
    def uniform(input_ids, attention_mask):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 300))

    one = Example(prompt="a", answer=" b", choices=(" b", " c"))
    assert answer_examples(uniform, tiny_tokenizer(), [one])["right"].tolist() == [0]


def test_no_examples_are_refused():
    with pytest.raises(InputError, match="need at least 1 of each"):
        made("agreement", held_out=0)
    with pytest.raises(InputError, match="b has 1 documents"):
        genres(
            texts={"a": ["x " * 20] * 2, "b": ["x " * 20, "y"]},
            train=1,
            held_out=1,
            generator=torch.Generator(),
        )


def test_answers_of_tasks_are_tokens_behind_their_prompts():
    tokenizer = as_llama_2()
    made = pad_prompts([("gave to", " Mary"), ("year 1", "7")], tokenizer)
    labels = [[one for one in row.tolist() if one != -100] for row in made["labels"]]
    assert [tokenizer.convert_ids_to_tokens(row) for row in labels] == [["▁Mary"], ["7"]]
