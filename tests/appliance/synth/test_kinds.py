"""A decided router: rounding changes no choice and no token, a wrong expert changes both."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from appliance.checkpoint.synth import SynthSpec, kinds, synthesize
from appliance.engine.dense_twin import write_dense_twin
from appliance.errors import UsageError

pytestmark = pytest.mark.engine

SIZES: dict[str, Any] = {"dense_layers": 0, "hidden_size": 1024, "intermediate_size": 128}
FP16 = 2.0**-11  # of a value: the most that one rounding to fp16 changes it by
PROMPTS = [[4 + (7 * p + 13 * i * (p + 1)) % 900 for i in range(12)] for p in range(12)]
STEPS = 24
SURE = 0.1  # logits between the two best tokens


class Model:
    """transformers' class on the decoded weights, in float32; `rounding` is added to all of it."""

    def __init__(self, folder: Path, router: str) -> None:
        import transformers

        synthesize(folder / "made", SynthSpec(router=router, **SIZES))
        write_dense_twin(folder / "made", folder / "twin")
        self.rounding, self.random = 0.0, torch.Generator()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "twin", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.scores: list[torch.Tensor] = []
        for layer in self.model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda _m, _i, out: self.scores.append(out[0]))
            for part in (layer.self_attn, layer.mlp, layer):
                part.register_forward_hook(self._round)

    def _round(self, _module: Any, _inputs: Any, out: Any) -> Any:
        first, *rest = out if isinstance(out, tuple) else (out,)
        noise = torch.empty_like(first).uniform_(-1, 1, generator=self.random)
        first = first * (1 + self.rounding * noise)
        return (first, *rest) if isinstance(out, tuple) else first

    @contextmanager
    def rounded(self, seed: int) -> Iterator[None]:
        self.rounding = FP16
        self.random.manual_seed(seed)
        yield
        self.rounding = 0.0

    def choices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts that every token chooses in every layer, as one row each, and their lead."""
        self.scores.clear()
        with torch.inference_mode():
            self.model(torch.tensor(PROMPTS))
        best = torch.stack(self.scores).sort(-1, descending=True)
        lead = best.values[..., 3] - best.values[..., 4]
        return best.indices[..., :4].sort(-1).values, lead

    def texts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy tokens [prompts, STEPS] and their leads in logits."""
        step, cache, tokens, leads = torch.tensor(PROMPTS), None, [], []
        with torch.inference_mode():
            for _ in range(STEPS):
                out = self.model(input_ids=step, past_key_values=cache, use_cache=True)
                best, cache = out.logits[:, -1].topk(2, -1), out.past_key_values
                step = best.indices[:, :1]
                tokens.append(step[:, 0])
                leads.append(best.values[:, 0] - best.values[:, 1])
        return torch.stack(tokens, 1), torch.stack(leads, 1)


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices: a second thread waits more than it works
    yield Model(tmp_path_factory.mktemp("decided"), "decided")
    torch.set_num_threads(before)


def test_rounding_changes_no_choice_of_an_expert(decided: Model) -> None:
    chosen, lead = decided.choices()
    for seed in range(3):
        with decided.rounded(seed):
            again, moved = decided.choices()
        assert torch.equal(again, chosen)
        # What rounding does to a lead is a small part of the least of them.
        assert (moved - lead).abs().max() * 20 < lead.min()


def test_of_a_drawn_router_rounding_does_change_choices(tmp_path: Path) -> None:
    drawn = Model(tmp_path, "drawn")
    chosen, _ = drawn.choices()
    with drawn.rounded(0):
        again, _ = drawn.choices()
    assert not torch.equal(again, chosen)


def test_rounding_changes_no_token_of_which_the_model_is_sure(decided: Model) -> None:
    tokens, leads = decided.texts()
    sure = leads.min(1).values > SURE
    assert sure.sum() >= 4
    for seed in range(3):
        with decided.rounded(seed):
            again, _ = decided.texts()
        assert torch.equal(again[sure], tokens[sure])


@pytest.mark.parametrize("wrong", ["two experts swapped", "one expert silent"])
def test_a_wrong_expert_changes_most_texts_and_sure_ones(decided: Model, wrong: str) -> None:
    tokens, leads = decided.texts()
    experts = decided.model.model.layers[1].mlp.experts
    kept = experts.down_proj.data.clone()
    if wrong == "two experts swapped":
        experts.down_proj.data[[0, 1]] = kept[[1, 0]]
    else:
        experts.down_proj.data[0] = 0
    again, _ = decided.texts()
    experts.down_proj.data[:] = kept
    other = (again != tokens).any(1)
    sure = leads.min(1).values > SURE
    assert other.sum() > len(PROMPTS) / 2
    assert (other & sure).any()


def test_every_expert_serves_as_many_kinds_and_layers_differ(decided: Model) -> None:
    rows = {}
    for file in Path(decided.model.name_or_path).parent.glob("made/*.safetensors"):
        rows |= {k: v.float() for k, v in load_file(file).items() if ".gate.weight" in k}
        rows |= {k: v.float() for k, v in load_file(file).items() if "embed" in k}
    embedding = rows.pop("model.embed_tokens.weight")
    by_layer = []
    for router in rows.values():
        chosen = (embedding @ router.T).topk(4).indices.sort().values
        of_kind = chosen[:16]
        assert torch.equal(chosen, of_kind[torch.arange(len(chosen)) % 16])
        assert torch.equal(of_kind.flatten().bincount(), torch.full((16,), 4))
        by_layer.append(of_kind)
    assert not any(torch.equal(by_layer[0], other) for other in by_layer[1:])


def test_a_router_that_could_not_be_sure_is_refused_with_the_size_that_could() -> None:
    with pytest.raises(UsageError) as caught:
        SynthSpec(router="decided")
    assert "hidden_size 256 gives" in caught.value.message
    assert caught.value.fix == "hidden_size 896, or router drawn"
    assert kinds.lead(896, 4, 4) >= kinds.CLEAR > kinds.lead(768, 4, 4)


def test_families_whose_routers_choose_by_more_than_scores_are_refused() -> None:
    with pytest.raises(UsageError, match="deepseek_v3 is not made"):
        SynthSpec(family="deepseek_v3", router="decided", hidden_size=1024)
