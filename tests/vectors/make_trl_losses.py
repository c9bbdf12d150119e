"""Write what TRL's GRPOTrainer computes for fixed tensors: `python tests/vectors/make_trl_losses.py`, where TRL is.

`tests/vectors/training/trl.json` holds the inputs (natural log-probabilities now and when sampled, an advantage for
each completion) and, for each loss that TRL has and a run can name, its value and its gradient along the
log-probabilities. TRL is no dependency of the project: the file was written with the version that stands in it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from trl import GRPOTrainer

OUT = Path(__file__).parent / "training" / "trl.json"
MOST = 8
LENGTHS = (8, 3, 5, 1, 7, 4)
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04},
    "dr-grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"loss_type": "grpo", "level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "intellect-2": {"loss_type": "dapo", "delta": 4.0},
}


def trainer(settings: dict[str, Any], logp: torch.Tensor) -> Any:
    """Return what stands in for a GRPOTrainer while its loss is computed."""
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda value: value,
        reduce=lambda value, **_: value,
    )
    return SimpleNamespace(
        loss_type=settings["loss_type"],
        importance_sampling_level=settings.get("level", "token"),
        epsilon_low=settings.get("epsilon_low", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.2),
        beta=settings.get("beta", 0.0),
        args=SimpleNamespace(delta=settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=1),
        max_completion_length=MOST,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )


def main() -> None:
    """Write the file."""
    torch.manual_seed(7)
    shape = (len(LENGTHS), MOST)
    mask = (torch.arange(MOST) < torch.tensor(LENGTHS)[:, None]).long()
    now = (-2 * torch.rand(shape, dtype=torch.float64)).float()
    sampled = (now + 0.6 * torch.randn(shape)).clamp(max=-1e-3)
    sampled[0, 2], sampled[2, 1] = now[0, 2] - 3.0, now[2, 1] - 3.0  # ratios of 20, beyond every bound
    sampled[4], sampled[5] = now[4] + 1e-4, now[5] - 2e-4  # ratios of completions within GSPO's bounds
    reference = now + 0.3 * torch.randn(shape)
    advantages = torch.tensor([1.2, -0.4, -0.9, 0.3, 0.8, -1.1])
    losses = {}
    for name, settings in LOSSES.items():
        logp = now.clone().requires_grad_()
        inputs = {
            "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
            "completion_ids": torch.zeros(shape, dtype=torch.long),
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": sampled,
            "ref_per_token_logps": reference,
            "num_items_in_batch": mask.sum(),
        }
        loss = GRPOTrainer._compute_loss(trainer(settings, logp), None, inputs)
        (slope,) = torch.autograd.grad(loss, logp)
        losses[name] = {"trl": settings, "loss": loss.item(), "gradient": cut(slope)}
    written = {
        "trl": trl.__version__,
        "torch": torch.__version__.partition("+")[0],
        "most": MOST,
        "now": cut(now),
        "sampled": cut(sampled),
        "reference": cut(reference),
        "advantages": advantages.tolist(),
        "losses": losses,
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(written, indent=1) + "\n")


def cut(values: torch.Tensor) -> list[list[float]]:
    """Return each completion's own values."""
    return [line[:length].tolist() for line, length in zip(values, LENGTHS, strict=True)]


if __name__ == "__main__":
    main()
