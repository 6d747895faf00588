"""A callback that replays a network from a CUDA graph, for trainings that wait for the launches of small kernels."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override


class CUDAGraph(Callback):
    """Runs forward and backward of the module's ``network`` as one CUDA graph each, instead of kernel by kernel.

    The first training batch is captured. Batches of another shape, validation and test run as usual. Use it with
    simulated workers or a single GPU: DDP's hooks would not overlap with the backward of a graph.

    Raises:
        ValueError: before training, the module has no ``network`` or is not on a GPU.
    """

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network = getattr(pl_module, "network", None)
        if not isinstance(network, nn.Module):
            raise ValueError(f"{type(pl_module).__name__}.network is {network!r}. Must be the module to capture.")
        if pl_module.device.type != "cuda":
            raise ValueError(f"CUDAGraph on {pl_module.device}. Must be a GPU; otherwise remove the callback.")
        eager = network.forward

        def capture(images: Tensor) -> Tensor:
            if not network.training:
                return eager(images)  # type: ignore[no-any-return]
            network.forward = eager
            _capture(network, images)
            graphed = network.forward

            def replay(images_of_step: Tensor) -> Tensor:
                run = graphed if images_of_step.shape == images.shape else eager
                return run(images_of_step)  # type: ignore[no-any-return]

            network.forward = replay
            return replay(images)

        network.forward = capture

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The next replay overwrites its gradients, which simulated workers and accumulated batches still need.
        parameters = [parameter for parameter in pl_module.network.parameters() if parameter.grad is not None]
        copies = torch._foreach_mul([parameter.grad for parameter in parameters], 1.0)
        for parameter, copy in zip(parameters, copies, strict=True):
            parameter.grad = copy

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del pl_module.network.forward  # the class's again


def _capture(network: nn.Module, images: Tensor) -> None:
    """Replace ``network.forward`` by replays, without a change of its buffers by the passes that warm it up."""
    buffers = [buffer.clone() for buffer in network.buffers()]
    dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
    with torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=False):
        torch.cuda.make_graphed_callables(network, (images.clone(),))
    for buffer, before in zip(network.buffers(), buffers, strict=True):
        buffer.copy_(before)
