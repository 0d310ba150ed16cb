"""How the objects in a state are saved and restored. TensorFlow's objects are tested in test_keras.py."""

import copy
import dataclasses
import functools
import json
import random
from collections import Counter, namedtuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparkring import shards
from sparkring.checkpointing import tree
from sparkring.checkpointing.parts import (
    MARK,
    memory_of,
    plain,
    put_back,
    random_states,
    set_random_states,
    tree_of,
    versions,
)
from sparkring.errors import CheckpointError


@pytest.fixture(autouse=True, scope="module")
def framework():
    """Torch is imported here, because every worker of pytest-xdist imports this module, but only one runs the tests."""
    global torch
    import torch
    import torch.distributed.fsdp


def kept(state):
    """Return the state as it would be read back from a file: via JSON, with read-only copies of the arrays."""
    skeleton, leaves = tree.flatten(tree_of(state))
    skeleton, leaves = json.loads(json.dumps(skeleton)), copy.deepcopy(leaves)
    for leaf in leaves.values():
        if isinstance(leaf, np.ndarray):
            leaf.flags.writeable = False
    return tree.rebuild(skeleton, leaves)


def network():
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
    )


def train(model, optimizer, scheduler, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()


def all_tensors(model):
    return [tensor.clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize(
    "kind",
    [
        lambda parameters: torch.optim.Adam(parameters, 0.01, amsgrad=True),
        lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    ],
)
def test_a_torch_training_goes_on_bit_equal(kind):
    """Module, optimizer, scheduler and random states are restored."""
    torch.manual_seed(1)

    def make():
        model = network()
        optimizer = kind(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)

    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, 5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 5, "history": [1.5]}
    found, numbers = kept(state), kept(random_states())
    train(model, optimizer, scheduler, 5)

    torch.manual_seed(2)
    again, other, later = make()
    train(again, other, later, 2)
    fresh = {"model": again, "optimizer": other, "scheduler": later, "step": 0, "history": []}
    assert put_back(fresh, found) is fresh
    set_random_states(numbers)
    assert (fresh["model"], fresh["step"], fresh["history"]) == (again, 5, [1.5])
    train(again, other, later, 5)
    assert all(torch.equal(a, b) for a, b in zip(all_tensors(again), all_tensors(model), strict=True))
    assert later.get_last_lr() == scheduler.get_last_lr()


def test_schedulers_within_a_scheduler():
    """A MultiStepLR needs a Counter in its state, even if its state is part of another scheduler's state."""
    at = torch.optim.lr_scheduler

    def make():
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 1.0)
        return at.SequentialLR(optimizer, [at.ConstantLR(optimizer, 0.1, 3), at.MultiStepLR(optimizer, [2, 4])], [3])

    def step(scheduler):
        scheduler.optimizer.step()
        scheduler.step()
        return scheduler.get_last_lr()

    one, other = make(), make()
    step(one)
    put_back(other, kept(one))
    assert type(other._schedulers[1].milestones) is Counter
    assert [step(other) for _ in range(6)] == [step(one) for _ in range(6)]


def test_what_is_taken_of_tensors_is_their_own_memory():
    """tree_of() copies no arrays or CPU tensors, even in modules and lists. So a save copies them only once."""
    model, array, tensor = network(), np.arange(3.0), torch.arange(3.0)
    _, leaves = tree.flatten(tree_of({"model": model, "list": [array, {"deep": tensor}]}))
    with torch.no_grad():
        model[0].weight.fill_(7)
        tensor.fill_(8)
    array[:] = 9
    assert leaves["list/0"].tolist() == [9, 9, 9]
    assert all((leaf == 7).all() for name, leaf in leaves.items() if name.endswith("0.weight"))
    assert all((leaf == 8).all() for name, leaf in leaves.items() if "deep" in name)


TENSORS = [
    lambda: torch.tensor(1.5),
    lambda: torch.tensor([1, 2, 3], dtype=torch.int8),
    lambda: torch.zeros(0, 3),
    lambda: torch.arange(6.0).reshape(2, 3).T,
    lambda: torch.tensor([True, False]),
    lambda: torch.tensor([1 + 2j]).conj(),
    lambda: torch.arange(6).reshape(2, 3).to(torch.bfloat16).T,
    lambda: torch.tensor(0.5, dtype=torch.bfloat16),
    lambda: torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn),
    lambda: torch.tensor([1.0, float("nan"), -0.0], dtype=torch.float16),
]


@pytest.mark.parametrize("make", TENSORS)
def test_tensors_of_all_kinds(make):
    """Dtype, shape and bits are kept. Values are copied into a tensor that fits. Any other tensor is replaced."""

    def same(one, other):
        a, b = one.resolve_conj().contiguous().reshape(-1), other.resolve_conj().contiguous().reshape(-1)
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        )

    tensor = make()
    found = kept({"x": tensor})
    assert same(plain(found)["x"], tensor)
    live = torch.empty_like(tensor)
    assert put_back({"x": live}, found)["x"] is live
    assert same(live, tensor)
    other = torch.zeros(7, 7)
    assert same(put_back({"x": other}, found)["x"], tensor)
    assert other.sum() == 0
    assert same(put_back({"x": None}, found)["x"], tensor)


def test_tensors_that_torch_does_not_change():
    """Tensors of inference mode are restored in place. A tensor whose elements share memory is replaced."""
    with torch.inference_mode():
        live = {"average": torch.ones(2), "same": torch.ones(1).expand(2)}
    found = kept({"average": torch.tensor([1.0, 2.0]), "same": torch.zeros(2)})
    average = live["average"]
    assert put_back(live, found)["average"] is average
    assert average.tolist() == [1, 2]
    assert live["same"].tolist() == [0, 0]


def test_a_parameter_that_does_not_fit():
    """A parameter of another shape must belong to another model. The error names the parameter."""
    found = kept({"w": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(CheckpointError, match=r"state\['w'\]\[0\]: .* shape \[2\] .* shape \[3\]"):
        put_back({"w": [torch.nn.Parameter(torch.zeros(3))]}, found)
    live = torch.nn.Parameter(torch.ones(2))
    assert put_back({"w": [live]}, found)["w"][0] is live
    assert live.requires_grad
    assert live.tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.zeros(2).to_sparse(), "sparse_coo"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), "nested"),
    ],
)
def test_tensors_that_cannot_be_kept(make, kind):
    """The error has the path in the state, and the kind of the tensor."""
    with pytest.raises(CheckpointError, match=rf"state\['a'\]\['b'\] .*tensor .*kind .*{kind}"):
        tree_of({"a": {"b": make()}})


def test_a_lazy_module():
    """Before its first call, it cannot be saved, but a checkpoint can be restored into it."""
    lazy, found = torch.nn.LazyLinear(1), kept({"model": torch.nn.Linear(2, 1)})
    with pytest.raises(CheckpointError, match=r"state\['model'\]\['weight'\] belongs .*lazy module.*call the modu"):
        tree_of({"model": lazy})
    assert memory_of({"model": lazy}) == {}
    put_back({"model": lazy}, found)
    assert lazy.weight.shape == (1, 2)


def test_a_module_that_is_another_one():
    """The error has the path, torch's message, and what to do."""
    found = kept({"model": network()})
    with pytest.raises(CheckpointError, match=r"^state\['model'\]: .*Linear.*Missing key.*--fresh\.$") as caught:
        put_back({"model": torch.nn.Linear(3, 4)}, found)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"state\['model'\] .*Linear, .*type int"):
        put_back({"model": torch.nn.Linear(3, 4)}, {"model": 3})
    with pytest.raises(CheckpointError, match=r"state\['optimizer'\]: .* no value .* 'model'"):
        put_back({"model": network(), "optimizer": None}, found)


def test_hooks_and_versions_of_modules():
    """Hooks run, the extra state is restored, and a module gets the version with which it was saved."""

    class Noted(torch.nn.Module):
        """A module with extra state. It notes the version with which it was saved."""

        _version = 3

        def __init__(self):
            super().__init__()
            self.seen = None
            self.extra = {"a": 1}

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            self.extra = state

        def _load_from_state_dict(self, state, prefix, metadata, *others):
            self.seen = metadata.get("version")
            super()._load_from_state_dict(state, prefix, metadata, *others)

    model, ran = torch.nn.Sequential(Noted()), []
    # Before torch 2.5, the method had the second name.
    after_saving = getattr(model, "register_state_dict_post_hook", None) or model._register_state_dict_hook
    after_saving(lambda *_: ran.append("saved"))
    model[0].extra = {"a": [2, None]}
    found = kept(model)
    again = torch.nn.Sequential(Noted())
    again.register_load_state_dict_post_hook(lambda *_: ran.append("loaded"))
    put_back(again, found)
    assert ran == ["saved", "loaded"]
    assert (again[0].seen, again[0].extra) == (3, {"a": [2, None]})


class Mine:
    """An object with state_dict() and load_state_dict()."""

    def __init__(self, held):
        self.held = held

    def state_dict(self):
        return self.held

    def load_state_dict(self, held):
        if held == "bad":
            raise ValueError
        self.held = held


def test_anything_with_a_state_dict():
    """A user's object and torch's scaler can be saved. A class cannot, although it has the methods, too."""
    mine = Mine({1: (2, {"x": np.arange(3)}), "model": torch.nn.Linear(1, 1)})
    there = Mine(None)
    put_back([there], kept([mine]))
    assert there.held[1][0] == 2
    assert there.held[1][1]["x"].tolist() == [0, 1, 2]
    assert set(there.held["model"]) == {"weight", "bias"}
    with pytest.raises(CheckpointError, match=r"state: .*Mine .*Mine: ValueError"):
        put_back(Mine(0), kept(Mine("bad")))
    if hasattr(torch.amp, "GradScaler"):  # before 2.3, torch had a scaler for GPUs only
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        put_back(scaler, kept(torch.amp.GradScaler("cpu", init_scale=8.0)))
        assert scaler.get_scale() == 8.0
    with pytest.raises(CheckpointError, match=r"state\[0\]"):
        tree.flatten(tree_of([Mine]))


def test_a_state_that_contains_itself():
    """The error has the path. A state with far too many levels for a checkpoint raises an error, too."""
    state = {"model": torch.nn.Linear(1, 1), "a": []}
    state["a"].append(state)
    with pytest.raises(CheckpointError, match=r"state\['a'\]\[0\] contains itself"):
        tree_of(state)
    deep = [state["model"]]
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="more than 100 levels"):
        tree.flatten(tree_of({"deep": deep}))


Pair = namedtuple("Pair", "a b")


def test_plain_values_take_the_place_of_what_is_there():
    """The containers stay the same objects. Saved keys are added, and keys that were not saved are removed."""
    saved = {
        "step": 7,
        "none": None,
        "history": {"loss": [1.0, 2.0], "mae": [3.0]},
        "list": [1, [2, (3, b"x")]],
        "pair": Pair(1, 2.5),
        "counts": Counter("aab"),
        4: np.float32(0.5),
    }
    live = {
        "step": 0.0,
        "none": 5,
        "history": {"loss": [], "gone": []},
        "list": [0],
        "pair": Pair(0, 0),
        "counts": {},
        4: 0,
    }
    history, items = live["history"], live["list"]
    assert put_back(live, kept(saved)) is live
    assert live == saved
    assert isinstance(live["pair"], Pair)
    assert live["history"] is history
    assert live["list"] is items
    assert isinstance(live[4], np.float32)
    assert plain(kept(saved)) == {**saved, "pair": (1, 2.5)}


def test_arrays_are_copied_into():
    """Values are copied into arrays that are alike and writable; other arrays are replaced by the saved ones."""
    same, other, fixed = np.zeros(3), np.zeros(3, "f4"), np.zeros(3)
    fixed.flags.writeable = False
    state = {"same": same, "other": other, "list": [fixed, same]}
    put_back(state, kept({"same": np.arange(3.0), "other": np.arange(3.0), "list": [np.ones(3), np.full(3, 2.0)]}))
    assert state["same"] is same
    assert same.tolist() == [2, 2, 2]
    assert state["other"].dtype == float
    assert other.tolist() == fixed.tolist() == [0, 0, 0]
    assert state["list"][0].tolist() == [1, 1, 1]


def test_containers_of_objects_have_to_be_alike():
    """Each saved object is restored into the object at the same path, so both must exist."""
    found = kept({"models": [torch.nn.Linear(1, 1), torch.nn.Linear(2, 2)], "by": {"a": torch.nn.Linear(1, 1)}})
    with pytest.raises(CheckpointError, match=r"state\['models'\] .*1 items, .*2"):
        put_back({"models": [torch.nn.Linear(1, 1)]}, found)
    with pytest.raises(CheckpointError, match=r"state\['by'\]\['b'\]: .* no value .* 'a'"):
        put_back({"by": {"b": torch.nn.Linear(1, 1)}}, found)
    with pytest.raises(CheckpointError, match=r"state\['models'\] .*objects, .*type int"):
        put_back({"models": [torch.nn.Linear(1, 1)]}, {"models": 3})


@pytest.mark.parametrize("mine", [{MARK: "torch", "value": 3}, {MARK: MARK, 1: {MARK: None}}, [{MARK: "state_dict"}]])
def test_a_users_own_key_that_is_the_mark(mine):
    """A user's own key that equals MARK is restored like any other key."""
    assert plain(kept({"x": mine})) == {"x": mine}
    assert put_back({"x": None}, kept({"x": mine})) == {"x": mine}
    live = copy.deepcopy(mine)
    assert put_back(live, kept(mine)) is live
    assert live == mine


def test_a_kind_of_a_later_version():
    """The error names the kind, and the value is not returned as a dict."""
    with pytest.raises(CheckpointError, match=r"`later`, .*version .*sparkring .*not know"):
        plain({"x": [{MARK: "later"}]})


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def test_random_states_come_back():
    """The states of the global generators and of generators in a state are restored."""
    seed(1)
    random.gauss(0, 1)  # draws two numbers and keeps the second one, and so does NumPy's function
    np.random.standard_normal()
    own = [random.Random(4), np.random.default_rng(5), np.random.RandomState(6), torch.Generator().manual_seed(7)]

    def draw(own):
        mine = [own[0].random(), own[1].random(), own[2].random(), torch.rand(3, generator=own[3]).tolist()]
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.standard_normal(3).tolist(),
            torch.rand(3).tolist(),
            *mine,
        ]

    numbers, found = kept(random_states()), kept(own)
    wanted = draw(own)
    seed(2)
    others = [random.Random(), np.random.default_rng(), np.random.RandomState(), torch.Generator()]
    set_random_states(numbers)
    put_back(others, found)
    assert draw(others) == wanted
    with pytest.raises(CheckpointError, match=r"state\[0\]: .*Generator .*Random"):
        put_back([np.random.default_rng()], found[:1])
    with pytest.raises(CheckpointError, match=r"state: .*Generator cannot load"):
        put_back(np.random.Generator(np.random.MT19937()), kept(np.random.default_rng()))


@pytest.fixture
def numbered(tmp_path):
    pq.write_table(pa.table({"x": range(100)}), tmp_path / "a.parquet", row_group_size=30)
    return tmp_path


def test_data_goes_on_where_it_was(numbered):
    """Reading continues in the same epoch and order. versions() maps names of data sets to their versions."""
    data = shards(numbered, 10, columns=["x"])
    whole = [batch.tolist() for _ in range(2) for batch in list(data.as_numpy("x"))]
    data = shards(numbered, 10, columns=["x"])
    list(data.as_numpy("x"))
    reading = data.as_numpy("x")
    read = [next(reading).tolist() for _ in range(4)]
    reading.close()
    found = kept({"data": data})
    assert versions({"a": [data], "b": (torch.nn.Linear(1, 1), 3)}) == {str(numbered): data.dataset.version}

    data = shards(numbered, 10, columns=["x"], seed=9)
    state = {"data": data}
    put_back(state, found)
    assert state["data"] is data
    assert (data.epoch, data.steps) == (2, 6)
    rest = [batch.tolist() for batch in data.as_numpy("x")]
    assert read + rest == whole[10:]
    assert (data.epoch, data.steps) == (3, 10)


def test_data_that_has_changed(numbered):
    """A position in data that has changed is not valid. The error names the data."""
    found = kept({"data": shards(numbered, 10, columns=["x"])})
    pq.write_table(pa.table({"x": range(50)}), numbered / "b.parquet")
    with pytest.raises(
        CheckpointError, match=r"^state\['data'\]: the data of .* has changed since .*--fresh"
    ) as caught:
        put_back({"data": shards(numbered, 10, columns=["x"])}, found)
    assert str(numbered) in str(caught.value)


def test_a_process_group_is_not_waited_for(monkeypatch):
    """A module that is sharded over the ranks is refused: a rank that asked for its state would wait for the others."""

    class Wrapped(torch.nn.Linear):
        """A stand-in for FSDP's own class, which needs a process group."""

    monkeypatch.setattr(torch.distributed.fsdp, "FullyShardedDataParallel", Wrapped)
    with pytest.raises(CheckpointError, match=r"state\['m'\] is sharded .*get_model_state_dict"):
        tree_of({"m": torch.nn.Sequential(Wrapped(1, 1))})


@dataclasses.dataclass
class Epoch:
    loss: float
    weights: np.ndarray | None = None

    @functools.cached_property
    def rounded(self):
        return round(self.loss)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    rate: float
    sizes: tuple[int, ...] = ()
    best: Epoch | None = None


def test_dataclasses_are_restored_in_place():
    """Nested, frozen and slotted ones; arrays keep their memory, and cached properties are computed again."""
    saved = kept({"settings": Settings(0.1, (1, 2), Epoch(3.0, np.arange(2.0)))})
    epoch = Epoch(9.0, np.zeros(2))
    assert epoch.rounded == 9
    state = {"settings": (settings := Settings(0.5, (), epoch))}
    weights = epoch.weights
    put_back(state, saved)
    assert state["settings"] is settings
    assert (settings.rate, settings.sizes, epoch.loss, epoch.rounded) == (0.1, (1, 2), 3.0, 3)
    assert settings.best is epoch
    assert epoch.weights is weights
    assert weights.tolist() == [0.0, 1.0]


def test_new_dataclasses_are_made_where_the_state_has_none():
    """A list that has become longer, and None in the new state. load() returns dicts, which need no class."""
    saved = kept({"history": [Epoch(1.0), Epoch(2.0)], "best": Settings(0.1, best=Epoch(3.0)), "more": []})
    state = put_back({"history": [], "best": None, "more": [Epoch(0.0)]}, saved)
    assert state == {"history": [Epoch(1.0), Epoch(2.0)], "best": Settings(0.1, best=Epoch(3.0)), "more": []}
    assert plain(saved)["best"] == {"rate": 0.1, "sizes": (), "best": {"loss": 3.0, "weights": None}}


def test_a_dataclass_that_does_not_fit(monkeypatch):
    """The error names the fields that have changed, the missing class, or the attribute that cannot be saved."""
    saved = kept({"epoch": Epoch(1.0)})
    changed = dataclasses.make_dataclass("Epoch", ["loss", "accuracy"])
    with pytest.raises(CheckpointError, match=r"state\['epoch'\]: .*accuracy .*weights"):
        put_back({"epoch": changed(0.0, 0.0)}, saved)
    with pytest.raises(CheckpointError, match=r"state\['epoch'\] .*Epoch, .*checkpoint .*value .*type"):
        put_back({"epoch": Epoch(0.0)}, kept({"epoch": {"loss": 1.0}}))
    with pytest.raises(CheckpointError, match=r"\['best'\].*\['loss'\] is a `object`"):
        tree.flatten(tree_of({"best": Epoch(object())}))
    cyclic = Epoch(0.0)
    cyclic.weights = [cyclic]
    with pytest.raises(CheckpointError, match="contains itself"):
        tree_of({"epoch": cyclic})
    monkeypatch.delitem(globals(), "Epoch")
    with pytest.raises(CheckpointError, match=r"dataclass Epoch, .*not exist here"):
        put_back({"epoch": None}, saved)


def wrapped(net, how):
    """Return a module whose keys are those of a wrapped one, without a process group."""
    if how == "compiled":
        return torch.compile(net, backend="eager")
    if how == "compiled inside":
        net[0] = torch.compile(net[0], backend="eager")
        return net
    net = torch.nn.DataParallel(net)
    return torch.compile(net, backend="eager") if how == "both" else net


@pytest.mark.parametrize("how", ["parallel", "compiled", "compiled inside", "both"])
@pytest.mark.parametrize("is_saved_wrapped", [True, False])
def test_wrapped_and_bare_modules_load_each_others_state(how, is_saved_wrapped):
    """Also with the versions of modules, and into a module that is wrapped in another way."""
    torch.manual_seed(1)
    source, target = network(), network()
    weight = source[0].weight.detach().clone()
    if is_saved_wrapped:
        source = wrapped(source, how)
    else:
        target = wrapped(target, how)
    put_back({"model": target}, kept({"model": source}))
    assert torch.equal(next(target.parameters()), weight)
    put_back({"model": torch.nn.DataParallel(network())}, kept({"model": source}))


def test_a_submodule_named_like_a_wrappers_is_left_alone():
    """Only the difference between the two counts, and what does not fit is still an error."""
    net = torch.nn.ModuleDict({"module": torch.nn.Linear(1, 1)})
    other = torch.nn.ModuleDict({"module": torch.nn.Linear(1, 1)})
    put_back({"model": other}, kept({"model": torch.nn.DataParallel(net)}))
    assert torch.equal(other["module"].weight, net["module"].weight)
    with pytest.raises(CheckpointError, match=r"not fit .*Linear"):
        put_back({"model": torch.nn.Linear(2, 1)}, kept({"model": torch.nn.DataParallel(network())}))
