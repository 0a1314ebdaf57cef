"""explain with generated tokens: greedy decoding with a cache, and the page that steps through it."""

import json

import pytest

import clearhead as ch
from browser import opened, until
from clearhead.errors import RuleError, ShapeError
from clearhead.explaining.steps import steps_of_text
from terminal import call


def test_the_text_goes_on_with_generated_tokens():
    seen = steps_of_text("humpty dumpty", generate=5)
    assert seen.text.startswith("humpty dumpty sat on a")
    assert (seen.generated, len(seen.tokens)) == (5, 7)
    printed = call("explain", "humpty dumpty", "--generate", 5, "--steps").stdout
    assert "the model generated the last 5" in printed
    data = json.loads(call("explain", "humpty dumpty", "--generate", 5, "--json", "-").stdout)
    assert (data["generated"], data["text"]) == (5, seen.text)


def test_what_cannot_be_generated_is_refused():
    for count, error, what in ((255, ShapeError, "256 positions"), (-1, RuleError, "generate is")):
        with pytest.raises(error, match=what):
            steps_of_text("humpty dumpty", generate=count)
        assert what in call("explain", "humpty dumpty", "--generate", count).stderr


@pytest.mark.parametrize("ids", [[], ["humpty"], [[1, 2]], [1.5], [True], [-1], [2400], 3, None])
def test_ids_that_cannot_be_are_refused(ids):
    model = ch.load_model()
    for ask in (model.run, lambda ids: model.generate(ids, 1)):
        with pytest.raises(RuleError, match="expected a text, or whole numbers from 0 to 2399"):
            ask(ids)
    with pytest.raises(RuleError, match="count is -1: expected a whole number from 0 up"):
        model.generate("humpty dumpty", -1)
    assert model.tokenizer.text(10**5) == "⟨id 100000⟩"  # embeddings may have more rows than there are words
    assert model.generate("humpty dumpty", 2) == model.generate(model.tokenizer.continuation("humpty dumpty"), 2)


def test_the_page_marks_the_generated_tokens_and_says_what_followed_each(running):
    seen = steps_of_text("humpty dumpty", generate=5)
    with opened(running, seen.to_html(), wait=".passage .generated") as page:
        assert page.locator(".token.generated").count() == 5
        for place in (4, 2):
            page.locator(f".token[data-token='{place}']").click()
            until(page, f"document.querySelector('#readout').textContent.startsWith('query {place} ')")
            assert page.locator(".next bdi").first.text_content() == seen.following[place][0].text.replace(" ", "␣")


@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_run_of_the_first_tokens_saves_work_and_changes_nothing(more):
    model = ch.load_model()
    ids = [token.id for token in model.tokenizer.tokens("humpty dumpty sat on a wall")]
    run = model.run(ids[: len(ids) - more])
    assert model.generate(ids, 5, run=run) == model.generate(ids, 5)
