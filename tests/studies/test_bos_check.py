"""BOS in front of texts and chats is counted by using the tokenizer; a change between two models is an alarm."""

import pytest
from tokenizers import processors

from sink_lens.models.tiny import BOS_ID, tiny_tokenizer
from sink_lens.studies.bos_check import bos_in_front, check_bos, said_in_front

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def tokenizer(*, adds_bos: bool = True, template: str | None = TEMPLATE):
    made = tiny_tokenizer(adds_bos=adds_bos)
    made.chat_template = template
    return made


def doubled():
    made = tokenizer()
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <s> $A", pair=None, special_tokens=[("<s>", BOS_ID)]
    )
    return made


def other_bos():
    made = tokenizer()
    made.bos_token = made.eos_token
    return made


@pytest.mark.parametrize(
    ("make", "counts", "said"),
    [
        (tokenizer, (1, 1, 2), "puts 1 in front of a text, a chat begins with 1 (2 if its text is tokenised again)"),
        (doubled, (2, 1, 3), "puts 2 in front of a text, a chat begins with 1 (3 if"),
        (lambda: tokenizer(adds_bos=False), (0, 1, 1), "puts none in front of a text, a chat begins with 1"),
        (lambda: tokenizer(template=None), (1, None, None), "the tokenizer puts 1 in front of a text"),
        (lambda: tokenizer(template="{{ messages[9].content }}"), (1, None, None), "puts 1 in front of a text"),
    ],
)
def test_bos_is_counted_in_front_of_a_text_and_of_a_chat(make, counts, said):
    found = bos_in_front(make())
    assert tuple(found.values()) == counts
    assert said in said_in_front(found)


@pytest.mark.parametrize(
    ("make", "check", "said"),
    [
        (lambda: tokenizer(adds_bos=False), "bos", "the tokenizer puts no BOS in front of a text, the first model's 1"),
        (doubled, "bos", "the tokenizer puts 2 BOS in front of a text, the first model's 1"),
        (other_bos, "bos_token", "BOS is '</s>'"),
        (lambda: tokenizer(template="{{ bos_token }}" + TEMPLATE), "template", "begins with 2 BOS tokens; with the"),
        (lambda: tokenizer(template="{{ messages[0].content }}"), "template", "begins with 0 BOS tokens; with the"),
    ],
)
def test_a_change_of_bos_is_an_alarm_with_the_line_to_change(make, check, said):
    (alarm,) = [one for one in check_bos(tokenizer(), make()) if one.alarm]
    assert alarm.check == check
    assert said in alarm.said
    assert alarm.line.startswith(("tokenizer.json: ", "tokenizer_config.json: ", "chat_template.jinja: "))


def test_the_same_tokenizer_or_none_is_no_alarm():
    assert [one.check for one in check_bos(tokenizer(), tokenizer())] == ["vocabulary", "bos", "template"]
    assert not [one for one in check_bos(tokenizer(), tokenizer()) if one.alarm]
    assert check_bos(None, tokenizer()) == []
