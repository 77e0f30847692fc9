"""Memory for the arrays of a check: NumPy for the emulation, PyTorch on a GPU. Neither needs TensorFlow."""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np

POISON = 0xA5  # fills memory that a kernel must write


class Allocator(ctypes.Structure):
    """FusedrecAllocator of cuda_api.h."""

    _fields_ = [
        ("context", ctypes.c_void_p),
        ("allocate", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("release", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)),
    ]

    def __init__(self, allocate, release):
        fields = dict(self._fields_)
        super().__init__(None, fields["allocate"](allocate), fields["release"](release))


class NumpyMemory:
    """Uses host memory as the emulation's device memory."""

    stream = None

    def __init__(self):
        self.libc = ctypes.CDLL(None)
        self.libc.free.argtypes = [ctypes.c_void_p]
        self.library = None  # whose work is deferred
        self.used = []  # arrays that deferred work may use

    @contextlib.contextmanager
    def deferred(self, library, wander, seed):
        """Inside, work waits in the queue of its stream (emulation/streams.h)."""
        defer = lambda on: library.emulation_defer(on, ctypes.c_double(wander), ctypes.c_uint64(seed))  # noqa: E731
        defer(1)
        self.library = library
        yield
        defer(0)
        self.library = None
        self.used.clear()

    def put(self, array):
        """Returns a copy of `array` that kernels can read and write."""
        return self._kept(np.array(array, order="C", copy=True))

    def _kept(self, array):
        if self.library is not None:
            self.used.append(array)
        return array

    def empty(self, shape, dtype):
        """Returns memory with arbitrary contents."""
        array = np.empty(shape, dtype)
        array.view(np.uint8).reshape(-1)[:] = POISON
        return self._kept(array)

    def get(self, array):
        if self.library is not None:
            self.library.emulation_wait(self.stream)
        return array

    def pointer(self, array):
        return ctypes.c_void_p(array.ctypes.data)

    def allocate(self, bytes_):
        """Returns the address of memory at a multiple of 256 bytes, whose end AddressSanitizer knows."""
        address = ctypes.c_void_p()
        assert self.libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(256), ctypes.c_size_t(bytes_)) == 0
        ctypes.memset(address, POISON, bytes_)
        return address.value

    def release(self, address):
        if self.library is None:
            self.libc.free(address)
        else:
            self.library.emulation_free(ctypes.c_void_p(address), self.stream)


class TorchMemory:
    """Device memory by PyTorch. 16-bit floats travel as int16: only their bits matter here."""

    def __init__(self):
        import torch

        self.torch = torch
        self.stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.allocated = {}

    def put(self, array):
        array = np.ascontiguousarray(array)
        tensor = self.torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).cuda()
        tensor.numpy_form = (array.shape, array.dtype)
        return tensor

    def empty(self, shape, dtype):
        return self.put(NumpyMemory().empty(shape, dtype))

    def get(self, tensor):
        shape, dtype = tensor.numpy_form
        return tensor.cpu().numpy().view(dtype).reshape(shape)

    def pointer(self, tensor):
        return ctypes.c_void_p(tensor.data_ptr())

    def allocate(self, bytes_):
        """Returns an address from PyTorch's allocator, which reuses memory at once: all work is on one stream."""
        tensor = self.torch.empty(bytes_, dtype=self.torch.uint8, device="cuda")
        self.allocated[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def release(self, address):
        del self.allocated[address]


class Kernels:
    """Calls a library's launchers with arrays: device and host arrays by pointer, Python numbers by value.

    Args:
      path: libfusedrec_cuda.so, or an emulated one.
      memory: NumpyMemory or TorchMemory.

    Attributes:
      allocator: Gives launchers their scratch memory.
    """

    def __init__(self, path, memory):
        self.library = ctypes.CDLL(str(path))
        self.memory = memory
        self.allocator = Allocator(
            lambda _, bytes_: memory.allocate(bytes_), lambda _, address: memory.release(address)
        )

    def _convert(self, argument):
        if argument is None:
            return ctypes.c_void_p(None)
        if isinstance(argument, ctypes.c_void_p) or type(argument).__name__ == "CArgObject":  # the result of byref
            return argument
        if isinstance(argument, (bool, int, np.integer)):
            return ctypes.c_int64(int(argument))
        if isinstance(argument, float):
            return ctypes.c_float(argument)
        if isinstance(argument, (ctypes.Array, ctypes.Structure)):
            return ctypes.byref(argument)
        if isinstance(argument, np.ndarray):
            return ctypes.c_void_p(argument.ctypes.data)
        return self.memory.pointer(argument)

    def answer(self, name, *arguments):
        """Returns the answer of the launcher `fusedrec_<name>`, and adds the stream to its arguments."""
        return getattr(self.library, f"fusedrec_{name}")(*map(self._convert, arguments), self.memory.stream)

    def run(self, name, *arguments):
        code = self.answer(name, *arguments)
        assert code == 0, f"fusedrec_{name} answered {code}"
