"""What `torch.save` writes is read as it was, bit by bit."""

import numpy as np
import pytest

from vidax.errors import UserError
from vidax.weights import open_checkpoint

pytestmark = pytest.mark.parity

torch = pytest.importorskip("torch")

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]


def tensors() -> dict[str, "torch.Tensor"]:
    torch.manual_seed(0)
    base = torch.randn(4, 6, 5)
    return {
        **{str(dtype): (torch.randn(3, 4) * 10).to(dtype) for dtype in DTYPES},
        "whole": base,
        "transposed": base.permute(2, 0, 1),
        "part": base[1:, ::2, 3],
        "expanded": torch.randn(3, 1).expand(3, 7),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "large": torch.randn(300, 400).bfloat16(),
    }


def assert_same(checkpoint, expected):
    assert list(checkpoint) == list(expected)
    for name, tensor in expected.items():
        view = checkpoint[name].view()
        assert view.shape == tuple(tensor.shape), name
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.int16)
            view = np.ascontiguousarray(view).view(np.int16)
        assert view.dtype == tensor.detach().numpy().dtype, name
        np.testing.assert_array_equal(view, tensor.detach().numpy(), err_msg=name)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_tensors_of_every_kind(tmp_path, protocol):
    torch.save(tensors(), tmp_path / "a.pth", pickle_protocol=protocol)
    assert_same(open_checkpoint(tmp_path / "a.pth"), tensors())


def test_a_module_and_a_training_checkpoint(tmp_path):
    module = torch.nn.Sequential(torch.nn.Conv3d(2, 3, 1), torch.nn.BatchNorm1d(4))
    adam = torch.optim.AdamW(module.parameters())
    torch.save(module.state_dict(), tmp_path / "a.pth")
    assert_same(open_checkpoint(tmp_path / "a.pth"), module.state_dict())
    torch.save({"module": module.state_dict(), "optimizer": adam.state_dict(), "step": 7}, tmp_path / "b.pt")
    assert_same(open_checkpoint(tmp_path / "b.pt"), module.state_dict())


def test_what_is_refused(tmp_path):
    file = tmp_path / "a.pth"
    for value, name in (
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        ({"a": torch.zeros(2), "loss": np.float64(3)}, "numpy._core.multiarray.scalar"),
        ({"a": torch.zeros(2).to(torch.float8_e4m3fn)}, "torch._utils._rebuild_tensor_v3"),
    ):
        torch.save(value, file)
        with pytest.raises(UserError, match=f"asks for {name}, which weights do not need"):
            open_checkpoint(file)
    torch.save(tensors(), file, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"in the form that PyTorch wrote before 1\.6"):
        open_checkpoint(file)
