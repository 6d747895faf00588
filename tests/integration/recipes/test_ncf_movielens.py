"""The NeuMF recipe: its model, its samples, its metrics, its files."""

import os
import re
import resource
import zipfile
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torchmetrics.retrieval import RetrievalHitRate, RetrievalNormalizedDCG

from lightning_sparse import DDPHardThresholdStrategy, DensityMonitor
from recipes import MissingDataError
from recipes.ncf_movielens import archive
from recipes.ncf_movielens.data import MovieLensDataModule
from recipes.ncf_movielens.low_rank import draw_low_rank_ratings
from recipes.ncf_movielens.metrics import hits_and_gains, pessimistic_ranks
from recipes.ncf_movielens.model import NCFRecommender, NeuMF
from recipes.ncf_movielens.ratings import InvalidRatingsError, load_ratings, parse_ratings, unrated_items
from recipes.ncf_movielens.sampling import Shard, TrainingBatches, make_shard, ranking_batches
from tests.integration.models import assert_equal, quiet_trainer
from tests.integration.recipes.recipe_runs import DATA, needs_data
from tests.workers import of_all_workers, on_workers, run_workers

HEADER = "userId,movieId,rating,timestamp"


def write_ratings(path, rows, header=HEADER):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def some_rows():
    """Return ratings of 13 users (ids 5, 10, 20, …), each of ten movies (ids 7, 14, … 910), unsorted by time."""
    generator = np.random.default_rng(0)
    rated = np.arange(1, 131).reshape(13, 10)
    return [
        f"{5 if user == 0 else 10 * user},{7 * movie},3.5,{1000 + when}"
        for user, own in enumerate(rated)
        for movie, when in zip(own, generator.permutation(10), strict=True)
    ]


@pytest.fixture(scope="module")
def known():
    return draw_low_rank_ratings(num_users=60, num_items=200, ratings_per_user=8)


@pytest.fixture
def ratings(known):
    return known.ratings


@on_workers(1, process_group=False)
def test_a_checkpoint_remembers_the_models_size(tmp_path):
    model = NCFRecommender(factors=2, mlp_sizes=(4, 4))
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path, "limit_val_batches": 0}
    trainer = quiet_trainer("auto", num_workers=1, max_steps=1, **options)
    trainer.fit(model, MovieLensDataModule(source="builtin", batch_size=1000))
    again = NCFRecommender.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    assert (again.hparams["num_users"], again.hparams["num_items"]) == (1000, 400)
    assert torch.equal(again.network.user_factors.weight, model.network.user_factors.weight)


class TestModel:
    def test_is_a_product_beside_a_perceptron(self):
        torch.manual_seed(0)
        network = NeuMF(5, 7, factors=3, mlp_sizes=(4, 6, 2), dropout=0.5).eval()
        users, items = torch.tensor([0, 4, 4]), torch.tensor([6, 0, 1])
        product = network.user_factors.weight[users] * network.item_factors.weight[items]
        hidden = torch.cat([network.mlp_users.weight[users], network.mlp_items.weight[items]], dim=1)
        for layer in (network.mlp[0], network.mlp[3]):
            hidden = (hidden @ layer.weight.T + layer.bias).relu()
        expected = torch.cat([product, hidden], dim=1) @ network.output.weight[0] + network.output.bias
        torch.testing.assert_close(network(users.int(), items.int()), expected)
        assert [module.p for module in network.modules() if isinstance(module, torch.nn.Dropout)] == [0.5, 0.5]

    def test_a_model_without_a_size_raises(self):
        model = NCFRecommender()
        model.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        with pytest.raises(RuntimeError, match=r"num_users is unknown\. Pass it, or use"):
            model.configure_model()


def shards(ratings, world_size, **options):
    options = {"negatives": 4, "batch_size": 100, "heterogeneous": False, "seed": 1, **options}
    return [make_shard(ratings, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def epoch_batches(ratings, shard, rank=0, epoch=0, seed=1, device="cpu"):
    batches = TrainingBatches(shard, ratings.num_items, lambda: epoch, (seed, rank), torch.device(device))
    listed = list(batches)
    assert len(listed) == len(batches)
    return listed


class TestSampling:
    @pytest.mark.parametrize(
        ("world_size", "heterogeneous", "device"),
        [*product((1, 2, 3, 8), (False, True), ("cpu",)), pytest.param(1, False, "cuda", marks=pytest.mark.cuda)],
    )
    def test_every_positive_occurs_once_per_epoch_over_all_workers(self, ratings, world_size, heterogeneous, device):
        seen, sizes, labels = [], [], []
        for rank, shard in enumerate(shards(ratings, world_size, heterogeneous=heterogeneous)):
            batches = epoch_batches(ratings, shard, rank, device=device)
            sizes.append([len(users) for users, _, _ in batches])
            for users, items, label in batches:
                assert users.device.type == items.device.type == label.device.type == device
                seen += list(zip(users[label == 1].tolist(), items[label == 1].tolist(), strict=True))
                labels.append(label)
        assert sorted(seen) == sorted(zip(ratings.users.tolist(), ratings.items.tolist(), strict=True))
        assert len({len(own) for own in sizes}) == 1
        assert max(map(max, sizes)) <= 100
        assert all(max(own) - min(own) <= 1 for own in sizes)
        # Four negatives for each positive, on any worker.
        assert torch.cat(labels).mean().item() == pytest.approx(0.2)
        assert len(torch.cat(labels)) == 5 * len(ratings.users)

    def test_shuffled_shards_contain_negatives_for_their_own_positives(self, ratings):
        for shard in shards(ratings, 3):
            positives = shard.users[: len(shard.positive_items)]
            assert torch.equal(shard.users, positives.repeat(5))
        first, second = (shard.positive_items for shard in shards(ratings, 2))
        assert not torch.equal(torch.cat([first, second]), ratings.items)
        again, other = (shards(ratings, 2, seed=seed)[0].positive_items for seed in (1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_heterogeneous_shards_are_slices_by_label(self, ratings):
        eight = shards(ratings, 8, heterogeneous=True)
        total = 5 * len(ratings.users)
        shares = [len(shard.positive_items) / len(shard.users) for shard in eight]
        assert shares[0] == 1
        assert shares[1] == pytest.approx(0.6, abs=0.01)
        assert shares[2:] == [0] * 6
        assert [len(shard.users) for shard in eight] == pytest.approx([total / 8] * 8, abs=1)
        together = torch.cat([shard.users for shard in eight])
        assert torch.equal(together, ratings.users.repeat(5))
        assert torch.equal(torch.cat([shard.positive_items for shard in eight]), ratings.items)

    def test_negatives_are_drawn_anew_each_epoch_from_the_seed(self, ratings):
        shard = shards(ratings, 1)[0]

        def drawn(**which):
            users, items, labels = (
                torch.cat(parts) for parts in zip(*epoch_batches(ratings, shard, **which), strict=True)
            )
            return torch.stack([users, items, labels.int()])

        base = drawn()
        assert torch.equal(base, drawn())
        for other in ({"epoch": 1}, {"rank": 1}, {"seed": 2}):
            assert not torch.equal(base, drawn(**other))
            # The negatives differ, not only their order.
            assert sorted(base.T.tolist()) != sorted(drawn(**other).T.tolist())

    def test_negatives_are_uniform_over_all_items(self, ratings):
        shard = Shard(torch.zeros(100_000, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), num_batches=1)
        ((_, items, labels),) = epoch_batches(SimpleNamespace(num_items=20), shard)
        assert labels.sum() == 0
        # 5,000 of each item, with a standard deviation of 69.
        assert items.bincount(minlength=20).tolist() == pytest.approx([5000] * 20, abs=350)
        assert items.max() == 19

    def test_batches_are_shuffled_by_label(self, ratings):
        batches = epoch_batches(ratings, shards(ratings, 1)[0])
        # 20 of 100 samples, with a standard deviation of 4.
        assert all(5 <= labels.sum() <= 40 for _, _, labels in batches)
        assert {tuple(part.dtype for part in batch) for batch in batches} == {(torch.int32, torch.int32, torch.float32)}

    def test_refuses_more_workers_than_samples_for_their_batches(self, ratings):
        few = SimpleNamespace(users=ratings.users[:2], items=ratings.items[:2])
        with pytest.raises(ValueError, match="Cannot give each of 3 workers 1 batches of at most 100 samples: there"):
            shards(few, 3)

    @pytest.mark.parametrize(
        ("num_users", "batch_size", "world_size"), [(60, 10, 1), (60, 10, 2), (60, 10, 3), (60, 10, 7), (2, 1, 3)]
    )
    def test_every_user_is_ranked_on_one_worker(self, ratings, num_users, batch_size, world_size):
        candidates = ratings.candidates[:num_users]
        options = {"batch_size": 101 * batch_size, "world_size": world_size}
        parts = [list(ranking_batches(candidates, rank=rank, **options)) for rank in range(world_size)]
        assert len({len(part) for part in parts}) == 1  # some batches are empty if users are fewer than workers
        ranked = [user for part in parts for users, _ in part for user in users.tolist()]
        assert sorted(ranked) == list(range(num_users))
        for part in parts:
            for users, own in part:
                assert len(users) <= batch_size
                assert torch.equal(own, candidates[users])


@on_workers(2, process_group=False)
def test_epochs_of_two_workers():
    seed_everything(5)
    epochs = []
    listener = LambdaCallback(
        on_train_epoch_start=lambda *_: epochs.append([]),
        on_train_batch_start=lambda trainer, module, batch, index: epochs[-1].append(
            torch.stack([batch[0], batch[1], batch[2].int()])
        ),
    )
    data = MovieLensDataModule(source="builtin", batch_size=30_000)
    trainer = quiet_trainer("ddp", num_workers=2, max_steps=-1, max_epochs=2, callbacks=[listener])
    trainer.fit(NCFRecommender(factors=2, mlp_sizes=(4, 4)), data)
    hit_rates = of_all_workers(trainer.callback_metrics["val/hr10"].item())
    assert hit_rates == pytest.approx([hit_rates[0]] * 2)
    ratings = draw_low_rank_ratings().ratings
    positives = sorted(zip(ratings.users.tolist(), ratings.items.tolist(), strict=True))
    first, second = of_all_workers([torch.cat(epoch, dim=1) for epoch in epochs])
    for ours, theirs in zip(first, second, strict=True):
        together = torch.cat([ours, theirs], dim=1)
        assert sorted(map(tuple, together[:2, together[2] == 1].T.tolist())) == positives
        assert together.shape[1] == 5 * len(positives)
    negatives = [sorted(map(tuple, epoch[:2, epoch[2] == 0].T.tolist())) for epoch in first]
    assert negatives[0] != negatives[1]


class TestSplit:
    def test_splits_held_out_and_training_items(self, tmp_path):
        rows = some_rows()
        ratings = parse_ratings(write_ratings(tmp_path / "ratings.csv", rows))
        table = np.array([[float(part) for part in row.split(",")] for row in rows])
        user_ids, item_ids = np.unique(table[:, 0]), np.unique(table[:, 1])
        assert (ratings.num_users, ratings.num_items) == (len(user_ids), len(item_ids))
        assert ratings.users.dtype == ratings.items.dtype == ratings.candidates.dtype == torch.int32
        for user, user_id in enumerate(user_ids):
            own = table[table[:, 0] == user_id]
            trained = item_ids[ratings.items[ratings.users == user]].tolist()
            held_out = item_ids[ratings.candidates[user, 0]]
            assert held_out == own[own[:, 3].argmax(), 1]
            assert sorted([*trained, held_out]) == sorted(own[:, 1])
            # Keeps the order of the file.
            assert trained == [item for item in own[:, 1] if item != held_out]
            negatives = {*item_ids[ratings.candidates[user, 1:]].tolist()}
            assert len(negatives) == 100
            assert negatives.isdisjoint(own[:, 1])

    @pytest.mark.parametrize("num_items", [1000, 120, 104])
    def test_candidates_are_uniform(self, num_items):
        # Every user has rated items 0 to 3. Few items are enumerated; many are drawn until they are unrated.
        num_users = 3000
        rated = (np.arange(num_users)[:, None] * num_items + np.arange(4)).ravel()
        drawn = unrated_items(rated, np.full(num_users, 4), num_items, 100, seed=0)
        assert all(len(set(row)) == 100 for row in drawn.tolist())
        counts = np.bincount(drawn.ravel(), minlength=num_items)
        share = 100 / (num_items - 4)
        deviation = (num_users * share * (1 - share)) ** 0.5
        assert counts[:4].tolist() == [0] * 4
        assert counts[4:].tolist() == pytest.approx([num_users * share] * (num_items - 4), abs=5 * deviation + 1e-9)


class TestMetrics:
    @pytest.mark.parametrize("levels", [None, 15], ids=["distinct", "with ties"])
    def test_against_torchmetrics(self, levels):
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(200, 101, generator=generator)
        scores[:, 0] += 0.6
        nudged = scores.clone()
        if levels:
            scores = (scores * levels).floor() / levels
            nudged = scores.clone()
            # torchmetrics breaks ties arbitrarily; a lower score for the held-out item makes its rank pessimistic.
            nudged[:, 0] -= 1e-3
            assert (scores[:, 1:] == scores[:, :1]).any()
        relevant = torch.zeros(200, 101, dtype=torch.bool)
        relevant[:, 0] = True
        queries = torch.arange(200)[:, None].expand(200, 101)
        metrics = RetrievalHitRate(top_k=10), RetrievalNormalizedDCG(top_k=10)
        for ours, theirs in zip(hits_and_gains(scores), metrics, strict=True):
            theirs.update(nudged.flatten(), relevant.flatten(), indexes=queries.flatten())
            assert 0.1 < theirs.compute() < 0.9
            torch.testing.assert_close(ours.mean(), theirs.compute())


def learn_low_rank(world_size, strategy):
    seed_everything(1)
    data = MovieLensDataModule(source="builtin", batch_size=4096 // world_size)
    model = NCFRecommender(factors=8, mlp_sizes=(16, 16, 8), dropout=0.0, learning_rate=0.02, betas=(0.9, 0.999))
    density = DensityMonitor()
    if strategy == "sparse":
        strategy = DDPHardThresholdStrategy(threshold=1e-4)
    options = {"max_steps": -1, "max_epochs": 5, "limit_val_batches": 0, "callbacks": [density]}
    trainer = quiet_trainer(strategy, num_workers=world_size, **options)
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    return SimpleNamespace(
        hit_rate=trainer.callback_metrics["test/hr10"].item(),
        best=data.best_hit_rate,
        num_users=data.num_users,
        density=density.total(),
    )


class TestLowRank:
    def test_best_ranking_reaches_the_best_hit_rate(self):
        known = draw_low_rank_ratings()
        hits = pessimistic_ranks(known.scores.gather(1, known.ratings.candidates.long())) < 10
        best = known.best_hit_rate()
        deviation = (best * (1 - best) / len(hits)) ** 0.5
        assert hits.float().mean().item() == pytest.approx(best, abs=3 * deviation)
        # Popularity alone is far worse; chance is 10 / 101.
        popularity = known.ratings.items.bincount(minlength=known.ratings.num_items).float()
        hits = pessimistic_ranks(popularity[known.ratings.candidates.long()]) < 10
        assert hits.float().mean() < 0.6 * best

    @pytest.mark.full
    @pytest.mark.parametrize(("world_size", "strategy", "share"), [(1, "auto", 0.88), (2, "sparse", 0.75)])
    def test_a_model_learns_the_ranking_and_does_not_exceed_the_best(self, world_size, strategy, share):
        learned, *others = run_workers(learn_low_rank, world_size, world_size, strategy, process_group=False)
        assert learned.hit_rate > share * learned.best
        assert learned.hit_rate < learned.best + 3 * (learned.best * (1 - learned.best) / learned.num_users) ** 0.5
        assert all(other.hit_rate == learned.hit_rate for other in others)
        assert strategy != "sparse" or 0 < learned.density < 0.2


class TestFile:
    GOOD = ("1,2,3.0,4", "1,3,4.0,5")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "row 1: the file is empty"),
            (f"{HEADER}\n", "row 2: the file has no ratings below the header"),
            ("userId,movieId,rating\n1,2,3\n", "row 1: no column timestamp. The header is userId,movieId,rating. Must"),
            ("1,2,3.0,4\n1,3,4.0,5\n", "row 1: no column userId, movieId, rating, timestamp"),
            (["1,x,3.0,5"], "row 4: movieId 'x' is not a whole number"),
            (["1,9,three,5"], "row 4: rating 'three' is not a number"),
            (["1,9,1e999,5"], "row 4: rating is not a finite number"),
            (["", "1,9,,5"], "row 5: rating '' is not a number"),
            (["1,9,4.0"], "row 4: timestamp '' is not a whole number"),
            (["1,9,4,0,5"], "row 4: 5 fields, expected 4"),
            (['"1,9,4.0,5'], "row 4: userId '\"1' is not a whole number"),
            (["1,2147483648,4.0,5"], "row 4: movieId 2147483648 is not within 0…2147483647"),
            (["1,-9,4.0,5"], "row 4: movieId -9 is not within"),
            (["1,9,4.0,9223372036854775808"], "row 4: timestamp '9223372036854775808' is not a whole number of 64"),
            (["1,3,4.0,9"], "row 4: user 1 has rated movie 3 in an earlier row already"),
            (["8,3,4.0,9", "9,3,4.0,9"], "row 4: user 8 has this rating only"),
            ([], "row 3: user 1 has left 0 of 2 movies unrated. Ranking needs 100"),
        ],
    )
    def test_refuses(self, text, message, tmp_path):
        path = tmp_path / "ratings.csv"
        path.write_text(text if isinstance(text, str) else "\n".join([HEADER, *self.GOOD, *text]) + "\n")
        with pytest.raises(InvalidRatingsError, match=re.escape(f"{path}, {message}")) as caught:
            load_ratings(path)
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == [path]

    def test_bad_row_of_a_later_chunk(self, tmp_path, monkeypatch):
        monkeypatch.setattr("recipes.ncf_movielens.table._CHUNK_ROWS", 10)
        rows = some_rows()
        path = write_ratings(tmp_path / "ratings.csv", [*rows[:33], "1,?,2,3", *rows[33:], "1,2,3,4,5"])
        with pytest.raises(InvalidRatingsError, match=r"row 35: movieId '\?' is not"):
            parse_ratings(path)

    def test_layout_may_vary(self, tmp_path):
        rows = some_rows()
        usual = parse_ratings(write_ratings(tmp_path / "ratings.csv", rows))
        columns = [row.split(",") for row in rows]
        other = write_ratings(
            tmp_path / "other.csv",
            [line for row in columns for line in (f"{row[3]},x,{row[1]},{row[0]},{row[2]}\r", "")],
            header="timestamp,comment,movieId,userId,rating\r",
        )
        assert_equal(vars(parse_ratings(other)), vars(usual))

    def test_is_read_once(self, tmp_path, monkeypatch):
        path = write_ratings(tmp_path / "ratings.csv", some_rows())
        first = load_ratings(path)
        assert {file.name for file in tmp_path.iterdir()} == {"ratings.csv", "ratings.csv.cache.pt"}
        monkeypatch.setattr("recipes.ncf_movielens.ratings.parse_ratings", None)
        assert_equal(vars(load_ratings(path)), vars(first))

    def test_is_read_again_when_its_size_or_its_time_has_changed(self, tmp_path):
        path = write_ratings(tmp_path / "ratings.csv", rows := some_rows())
        positives = len(load_ratings(path).users)
        write_ratings(path, rows[1:])
        assert len(load_ratings(path).users) == positives - 1
        modified = path.stat().st_mtime_ns
        path.write_text(path.read_text().replace("3.5", "x.5", 1))
        os.utime(path, ns=(modified, modified + 1))
        with pytest.raises(InvalidRatingsError, match=r"rating 'x\.5' is not a number"):
            load_ratings(path)

    @pytest.mark.parametrize("content", [b"", b"no cache", b"PK\x03\x04 half of one"])
    def test_broken_cache_is_replaced(self, tmp_path, content):
        path = write_ratings(tmp_path / "ratings.csv", some_rows())
        cache = tmp_path / "ratings.csv.cache.pt"
        cache.write_bytes(content)
        expected = load_ratings(path)
        assert cache.stat().st_size > 1000
        users = expected.users.numpy().tobytes()
        cache.write_bytes(cache.read_bytes().replace(users, users[::-1]))  # torch.load does not see this damage
        assert torch.equal(load_ratings(path).users, expected.users)
        assert users in cache.read_bytes()

    def test_reads_without_a_cache_if_it_cannot_write(self, tmp_path):
        path = write_ratings(tmp_path / "ratings.csv", some_rows())
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as on a full disk
        try:
            with pytest.warns(UserWarning, match="cache could not be written: .*File too large"):
                assert load_ratings(path).num_users == 13
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.full
    @needs_data("ml-latest-small/ratings.csv")
    def test_real_ratings(self):
        ratings = parse_ratings(DATA / "ml-latest-small" / "ratings.csv")
        assert (ratings.num_users, ratings.num_items) == (610, 9_724)
        assert len(ratings.users) == len(ratings.items) == 100_836 - 610
        assert ratings.candidates.shape == (610, 101)
        # Popular movies are likely to be held out.
        popularity = ratings.items.bincount(minlength=ratings.num_items).float()
        hits = pessimistic_ranks(popularity[ratings.candidates.long()]) < 10
        assert 0.5 < hits.float().mean() < 0.7


class TestArchive:
    @pytest.fixture
    def server(self, tmp_path, monkeypatch):
        """Return the requests to a server that sends an intact archive."""
        asked = []

        def serve(url, path, *, md5=None):
            asked.append((url, path.name, md5))
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with zipfile.ZipFile(path, "w") as zipped:
                    zipped.writestr("ml-20m/ratings.csv", "rows")
                    zipped.writestr("ml-latest-small/ratings.csv", "few rows")
            return path

        monkeypatch.setattr(archive, "fetch", serve)
        return asked

    def test_fetches_checks_and_unpacks(self, server, tmp_path):
        path = archive.fetch_ratings(tmp_path / "data", "ml-20m")
        assert path == tmp_path / "data" / "ml-20m" / "ratings.csv"
        assert path.read_text() == "rows"
        url = "https://files.grouplens.org/datasets/movielens/ml-20m.zip"
        assert server == [(url, "ml-20m.zip", archive.MD5["ml-20m"])]
        assert [file.name for file in path.parent.iterdir()] == ["ratings.csv"]
        archive.fetch_ratings(tmp_path / "data", "ml-20m")
        assert len(server) == 1

    def test_other_data_set(self, server, tmp_path):
        assert archive.fetch_ratings(tmp_path, "ml-latest-small").read_text() == "few rows"
        assert [tuple(rest) for _, *rest in server] == [("ml-latest-small.zip", None)]

    @pytest.mark.parametrize("damage", ["cut", "no ratings", "flipped", "not deflated", "unknown compression"])
    def test_names_a_broken_archive(self, server, tmp_path, damage):
        path = archive.fetch(archive.SERVER, tmp_path / "ml-20m.zip")
        content = path.read_bytes()
        method = content.index(b"PK\1\2") + 10  # in the directory's first entry
        damaged = {
            "cut": content[:-30],
            "no ratings": content.replace(b"ml-20m/ratings.csv", b"ml-20m/rotings.csv"),
            "flipped": content.replace(b"rows", b"rots", 1),
            "not deflated": content[:method] + b"\x08" + content[method + 1 :],
            "unknown compression": content[:method] + b"\x63" + content[method + 1 :],
        }
        path.write_bytes(damaged[damage])
        message = rf"{re.escape(str(path))} is damaged: .*Delete it to download it"
        with pytest.raises(MissingDataError, match=message):
            archive.fetch_ratings(tmp_path, "ml-20m")
        assert not list((tmp_path / "ml-20m").iterdir())
