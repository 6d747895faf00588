"""The LSTM recipe: its model and hidden states, its columns, its text."""

import hashlib
import itertools
import math
import os
import re
import zipfile
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.nn.functional import cross_entropy

from recipes import MissingDataError
from recipes.lstm_wikitext2 import corpus as corpus_module
from recipes.lstm_wikitext2.corpus import FILES, Corpus, CorpusError, read_wikitext2
from recipes.lstm_wikitext2.data import IGNORED, WikiText2DataModule, Windows, evaluation_columns, training_columns
from recipes.lstm_wikitext2.markov_chain import MarkovChain
from recipes.lstm_wikitext2.model import LSTMLanguageModel
from recipes.lstm_wikitext2.topics import article_starts
from tests.integration.checkpoints.test_checkpoint import SaveAt
from tests.integration.models import WEIGHTS_ONLY, assert_equal, quiet_trainer, warnings_of
from tests.integration.recipes.recipe_runs import DATA, needs_data, refuse_to_fetch
from tests.workers import on_workers, run_workers


def small_model(**arguments):
    torch.manual_seed(0)
    return LSTMLanguageModel(**{"vocabulary_size": 200, "hidden_size": 16, "num_layers": 2, "dropout": 0, **arguments})


class TestModel:
    def test_an_error_names_the_vocabulary_size(self):
        model = small_model()
        model.trainer = SimpleNamespace(datamodule=SimpleNamespace(vocabulary_size=333))
        with pytest.raises(ValueError, match=r"333 words, but the model has 200\. Add --model\.vocabulary_size=333"):
            model.setup("fit")
        model.trainer.datamodule.vocabulary_size = 20
        with pytest.warns(UserWarning, match="20 words, but the model has 200"):
            model.setup("fit")


class TestHiddenState:
    def test_is_carried_only_within_an_epoch(self):
        model, windows = small_model(), list(Windows(torch.randint(200, (3, 21)), 10))
        assert [window.shape for window, _ in windows] == [(10, 3), (10, 3)]
        inputs, targets = (torch.cat(parts) for parts in zip(*windows, strict=True))
        whole = cross_entropy(model(inputs)[0].flatten(0, 1), targets.flatten(), reduction="sum")
        for _ in range(2):  # the second epoch resets the hidden state
            parts = [model._summed_loss(window, index, "train") for index, window in enumerate(windows)]
            torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
            assert sum(int(words) for _, words in parts) == 60
        cold = sum(model._summed_loss(window, 0, "train")[0] for window in windows)
        assert not torch.isclose(cold, whole, rtol=1e-6)

    def test_has_no_gradient_and_is_separate_in_validation(self):
        model, (window, *_) = small_model(), list(Windows(torch.randint(200, (3, 21)), 10))
        model._summed_loss(window, 0, "train")
        before = model.hidden["train"]
        assert not any(state.requires_grad for state in before)
        model._summed_loss(window, 0, "val")
        assert model.hidden["train"] is before

    def test_is_dropped_if_columns_change(self):
        model, (window, *_) = small_model(), list(Windows(torch.randint(200, (3, 21)), 10))
        model.hidden["train"] = (torch.ones(2, 5, 16), torch.ones(2, 5, 16))
        with pytest.warns(UserWarning, match="state has 5 columns, but the text has 3"):
            model._summed_loss(window, 1, "train")

    def test_is_saved_in_a_checkpoint_within_an_epoch(self, tmp_path):
        path = str(tmp_path / "step 4.ckpt")
        whole = run_workers(twelve_steps, 2, path, None, process_group=False)
        resumed = run_workers(twelve_steps, 2, None, path, process_group=False)
        for first, second in zip(whole, resumed, strict=True):
            assert torch.equal(second["hidden"][0], first["hidden"][4])
            assert second["steps"] == first["steps"] == 12
            assert_equal(second["parameters"], first["parameters"])
            assert torch.equal(second["end"], first["end"])
        assert not torch.equal(whole[0]["hidden"][4], whole[1]["hidden"][4])
        (alone,) = run_workers(twelve_steps, 1, None, path, process_group=False)
        assert any("LSTM states of 2 workers, but this run has 1" in message for message in alone["messages"])
        assert alone["hidden"][0] is None


def twelve_steps(save, resume):
    """Train two epochs that save after step 4 or resume; return the states before each step and the results."""
    states, devices = [], int(os.environ["WORLD_SIZE"])

    def look(trainer, module, *_):
        state = module.hidden["train"]
        states.append(None if state is None else torch.stack(state).clone())

    callbacks = [LambdaCallback(on_train_batch_start=look), *([SaveAt(4, save)] if save else [])]
    options = {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 6, "limit_val_batches": 0}
    trainer = quiet_trainer("ddp" if devices > 1 else "auto", num_workers=devices, callbacks=callbacks, **options)
    model = small_model(warmup_from=1.0, learning_rate=1.0, milestones=(1.5,))
    messages: list[str] = []
    with warnings_of(messages):
        data = WikiText2DataModule(source="builtin", columns=3, bptt=5)
        trainer.fit(model, data, ckpt_path=resume, **WEIGHTS_ONLY)
    return {
        "hidden": states,
        "steps": trainer.global_step,
        "parameters": model.state_dict(),
        "end": torch.stack(model.hidden["train"]),
        "messages": messages,
    }


class TestColumns:
    @pytest.mark.parametrize(("tokens", "columns", "workers"), [(1000, 3, 4), (96, 4, 8), (101, 5, 1)])
    def test_workers_train_on_disjoint_columns_of_all_words_but_a_remainder(self, tokens, columns, workers):
        text = torch.arange(tokens)
        shards = [training_columns(text, columns, worker, workers) for worker in range(workers)]
        assert len({tuple(shard.shape) for shard in shards}) == 1
        read = torch.cat([shard.flatten() for shard in shards])
        assert torch.equal(read, text[: len(read)])
        assert tokens - len(read) < columns * workers

    @pytest.mark.parametrize(("tokens", "columns", "workers"), [(1000, 3, 4), (97, 4, 8), (3, 2, 3), (101, 5, 1)])
    def test_every_word_is_a_target_once_in_evaluation(self, tokens, columns, workers):
        text = torch.arange(1, tokens + 1)
        targets = []
        for worker in range(workers):
            windows = list(Windows(evaluation_columns(text, 0, columns, worker, workers), 7))
            assert len(windows) == math.ceil(math.ceil(tokens / columns / workers) / 7)
            for words, following in windows:
                is_word = following != IGNORED
                targets += following[is_word].tolist()
                assert torch.equal(words[is_word] + 1, following[is_word])
                assert words.min() >= 0
        assert sorted(targets) == text.tolist()

    def test_windows_are_contiguous_and_can_be_resumed(self):
        columns = torch.randint(200, (4, 32))
        windows = Windows(columns, 10)
        every = list(windows)
        assert [len(words) for words, _ in every] == [10, 10, 10, 1]
        assert len(windows) == 4
        assert torch.equal(torch.cat([words for words, _ in every]), columns[:, :-1].T)
        assert torch.equal(torch.cat([targets for _, targets in every]), columns[:, 1:].T)
        assert windows.state_dict() == {"position": 0}
        assert len(list(itertools.islice(windows, 3))) == 3
        state = windows.state_dict()
        assert state == {"position": 3}
        windows.load_state_dict(state)
        (last,) = list(windows)
        assert torch.equal(last[0], every[3][0])
        assert len(list(windows)) == 4


UNEVEN = 1003


class UnevenText(WikiText2DataModule):
    """1,003 words to validate on: 6 columns of 168 words, of which the last lacks 5."""

    def _read(self):
        text = torch.randint(200, (UNEVEN,), generator=torch.Generator().manual_seed(5))
        return Corpus(text, text, text, vocabulary_size=200, end_of_line=7)


@on_workers(2, process_group=False)
def test_perplexity_covers_all_words_of_all_workers():
    trainer = quiet_trainer("ddp", num_workers=2)
    model, data = small_model(), UnevenText(columns=3, eval_columns=3, bptt=30)
    with torch.no_grad():  # words with very different probabilities reveal miscounts
        model.network.decoder.bias.normal_(std=3)
    [validated], [tested] = trainer.validate(model, data, verbose=False), trainer.test(model, data, verbose=False)
    model.eval()
    text = UnevenText()._read().val
    losses = []
    with torch.no_grad():
        for first in range(0, UNEVEN, 168):  # reference: a column at a time, without windows
            targets = text[first : first + 168]
            words = torch.cat([text[first - 1 : first] if first else torch.tensor([7]), targets[:-1]])
            logits, _ = model.network(words[:, None])
            losses.append(cross_entropy(logits[:, 0].double(), targets, reduction="none"))
    expected = torch.cat(losses).mean().exp().item()
    windows = [
        torch.cat([column[first : first + 30] for column in columns]).mean().exp()
        for columns in (losses[:3], losses[3:])
        for first in range(0, 168, 30)
    ]
    assert len(torch.cat(losses)) == UNEVEN
    assert validated["val/perplexity"] == pytest.approx(expected, rel=1e-5)
    assert validated["val/loss"] == pytest.approx(math.log(expected), rel=1e-5)
    mean = torch.stack(windows).mean().item()
    assert validated["val/perplexity_mean_of_windows"] == pytest.approx(mean, rel=1e-5)
    assert mean > 1.01 * expected
    assert tested["test/perplexity"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
@on_workers(1, process_group=False)
def test_the_model_learns_a_markov_chain():
    torch.manual_seed(0)
    model = LSTMLanguageModel(200, 64, 1, dropout=0, learning_rate=10, warmup_epochs=0.2, milestones=(1.5,))
    data = WikiText2DataModule(source="builtin", columns=20, bptt=20)
    options = {"limit_train_batches": 200, "num_sanity_val_steps": 0, "gradient_clip_val": 0.4}
    trainer = quiet_trainer("auto", num_workers=1, max_steps=-1, max_epochs=2, **options)
    trainer.fit(model, data)
    floor = MarkovChain().perplexity()
    # The deviation of the mean over 20,000 words is 0.7 %.
    assert 0.98 * floor < trainer.callback_metrics["val/perplexity"].item() < 1.3 * floor
    assert floor < 10  # a model without memory reaches at best about 190


def write_corpus(folder, **contents):
    """Write three small files; ``contents`` replaces some of them, None leaves a file out."""
    folder.mkdir(parents=True)
    for split, name in FILES.items():
        content = contents.get(split, b" = Title = \n \n a b c a <unk> b \n" * 20)
        if content is not None:
            (folder / name).write_bytes(content)


class TestBadInput:
    @pytest.mark.parametrize(
        ("contents", "message"),
        [
            ({"val": b""}, "wiki.valid.tokens is empty: 0 bytes"),
            ({"test": b" \n \n"}, "wiki.test.tokens is empty: 4 bytes"),
            (
                {"train": b"a b \n c d \n e \xe9 f \n"},
                "wiki.train.tokens, line 3: the byte 0xe9 at offset 14 is not UTF-8",
            ),
        ],
    )
    def test_an_error_names_the_unreadable_file(self, contents, message, tmp_path):
        write_corpus(tmp_path / "wikitext-2", **contents)
        with pytest.raises(CorpusError, match=re.escape(f"{tmp_path}/wikitext-2/{message}")):
            read_wikitext2(tmp_path / "wikitext-2")

    def test_an_error_names_the_file_before_any_download(self, tmp_path):
        write_corpus(tmp_path / "wikitext-2", val=None)
        message = r"wiki\.valid\.tokens of WikiText-2 is not in .*Put wikitext-2-v1\.zip from https\S+ into .*builtin"
        with pytest.raises(MissingDataError, match=message):
            WikiText2DataModule(root=str(tmp_path)).setup("fit")

    def test_text_too_short_for_the_columns_raises(self, tmp_path):
        write_corpus(tmp_path / "wikitext-2")
        data = WikiText2DataModule(root=str(tmp_path), columns=200)
        with pytest.raises(CorpusError, match=r"wiki\.train\.tokens has 240 words to train on, too few for 200 col"):
            data.setup("fit")


class TestData:
    def test_vocabulary_comes_from_the_training_split(self, tmp_path):
        write_corpus(tmp_path / "w", train=b"b a a \n a b c \n", val=b"c d \n", test=b"a \n")
        corpus = read_wikitext2(tmp_path / "w")
        assert corpus.vocabulary_size == 5  # <unk>, a, <eos> and b (both twice), c
        unknown, a, end, b, c = range(5)
        assert corpus.train.tolist() == [b, a, a, end, a, b, c, end]
        assert corpus.val.tolist() == [c, unknown, end]
        assert corpus.end_of_line == end
        limited = read_wikitext2(tmp_path / "w", vocabulary_size=4)
        assert limited.vocabulary_size == 4
        assert limited.train.tolist() == [b, a, a, end, a, b, unknown, end]

    def test_articles_by_topic(self, tmp_path):
        about = {"ships": "the ship sailed the sea", "birds": "a bird sat in a tree"}
        articles = {
            f"{topic} {number}": f" \n = {topic} {number} = \n \n {text} {number} \n = = more = = \n {text} \n"
            for number in range(4)
            for topic, text in about.items()
        }
        write_corpus(tmp_path / "wikitext-2", train="".join(articles.values()).encode())
        data = WikiText2DataModule(root=str(tmp_path), columns=1, heterogeneous=True)
        data.setup("fit")
        plain = read_wikitext2(tmp_path / "wikitext-2")

        def articles(text):
            starts = article_starts(text, plain.end_of_line, plain.heading).tolist()
            return text[: starts[0]], [text[a:b].tolist() for a, b in itertools.pairwise([*starts, len(text)])]

        (start, before), (new_start, after) = articles(plain.train), articles(data.corpus.train)
        assert torch.equal(start, new_start)
        assert len(before) == 8
        assert sorted(before) == sorted(after)
        topics_in_order = [before.index(article) % 2 for article in after]
        assert topics_in_order in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)

    def test_text_without_articles_has_no_topics(self, tmp_path):
        write_corpus(tmp_path / "wikitext-2", train=b" = = no title = = \n a b \n" * 20)
        data = WikiText2DataModule(root=str(tmp_path), columns=1, heterogeneous=True)
        with pytest.raises(CorpusError, match=r"wiki\.train\.tokens: Got 0 articles to sort by topic. Must have"):
            data.setup("fit")

    def test_share_of_the_training_split(self, tmp_path):
        write_corpus(tmp_path / "wikitext-2")
        data = WikiText2DataModule(root=str(tmp_path), columns=2, train_share=0.5)
        data.setup("fit")
        assert (len(data.corpus.train), len(data.corpus.val)) == (120, 240)

    @pytest.fixture
    def archive(self, tmp_path, monkeypatch):
        """The contents of files on a server, with their expected md5, and the requests to it."""
        contents = {name: f"the text of {name} \n".encode() for name in FILES.values()}
        digests = {name: hashlib.md5(content, usedforsecurity=False).hexdigest() for name, content in contents.items()}
        monkeypatch.setattr(corpus_module, "MD5", digests)
        asked = []

        def fetch(url, path, *, md5=None):
            asked.append((url, path))
            path.parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(path, "w") as archive:
                for name, content in contents.items():
                    archive.writestr(f"wikitext-2/{name}", content)
            return path

        monkeypatch.setattr(corpus_module, "fetch", fetch)
        return contents, asked

    def test_unpacks_missing_files_with_a_single_request(self, tmp_path, archive):
        contents, asked = archive
        (tmp_path / "wikitext-2").mkdir()
        (tmp_path / "wikitext-2" / "wiki.test.tokens").write_bytes(contents["wiki.test.tokens"])
        untouched = (tmp_path / "wikitext-2" / "wiki.test.tokens").stat().st_mtime_ns
        for _ in range(2):
            WikiText2DataModule(root=str(tmp_path)).prepare_data()
            assert asked == [(corpus_module.URL, tmp_path / "wikitext-2-v1.zip")]
        files = {path.name: path.read_bytes() for path in (tmp_path / "wikitext-2").iterdir()}
        assert files == contents
        assert (tmp_path / "wikitext-2" / "wiki.test.tokens").stat().st_mtime_ns == untouched

    def test_other_text_in_place_of_the_files_is_used(self, tmp_path, archive):
        write_corpus(tmp_path / "wikitext-2")
        with pytest.warns(UserWarning, match=r"differs from WikiText-2's wiki.* and is used anyway"):
            WikiText2DataModule(root=str(tmp_path)).prepare_data()
        assert not archive[1]

    @pytest.mark.parametrize("damage", ["of a file", "of all"])
    def test_an_error_names_a_damaged_archive_and_leaves_no_file(self, damage, tmp_path, archive, monkeypatch):
        if damage == "of a file":
            monkeypatch.setitem(corpus_module.MD5, "wiki.train.tokens", "0" * 32)
        else:
            (tmp_path / "wikitext-2-v1.zip").write_bytes(b"<html>gone</html>")
            monkeypatch.setattr(corpus_module, "fetch", lambda url, path: path)
        data = WikiText2DataModule(root=str(tmp_path))
        data.prepare_data()
        reason = r"its wiki\.train\.tokens has md5 .*" if damage == "of a file" else ""
        with pytest.raises(MissingDataError, match=rf"wikitext-2-v1\.zip is damaged: {reason}.*Delete it"):
            data.setup("fit")
        assert not list((tmp_path / "wikitext-2").iterdir())

    @pytest.mark.full
    @needs_data("wikitext-2")
    def test_real_text(self, monkeypatch):
        monkeypatch.setattr(corpus_module, "fetch", refuse_to_fetch)
        data = WikiText2DataModule(root=str(DATA))
        data.prepare_data()  # warns if a file is wrong
        data.setup("fit")
        assert len(data.corpus.train) == 2_088_628
        assert (len(data.corpus.val), len(data.corpus.test)) == (217_646, 245_569)
        assert data.vocabulary_size == 33_278
        assert len(data.train_dataloader()) == math.ceil((2_088_628 // 128 - 1) / 30)
        words, targets = next(iter(data.val_dataloader()))
        assert words.shape == targets.shape == (30, 10)
        limited = read_wikitext2(data.root / "wikitext-2", vocabulary_size=5000)
        assert limited.vocabulary_size == 5000
        english = read_wikitext2(data.root / "wikitext-2", "basic_english")
        assert english.vocabulary_size == 28_783
