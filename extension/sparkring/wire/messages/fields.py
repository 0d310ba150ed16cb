"""Types of the messages' fields."""

from typing import Annotated, Literal

Buffer = bytes | bytearray | memoryview
Buffers = tuple[Buffer, ...]
Count = Annotated[int, range(1 << 63)]
Port = Annotated[int, range(1, 1 << 16)]
Seed = Annotated[int, range(1 << 32)]
SignalNumber = Annotated[int, range(1, 65)]

Stream = Literal["stdout", "stderr"]
DataKind = Literal["parquet", "petastorm", "tfrecord"]
CheckpointKind = Literal["sparkring", "keras", "tensorflow", "torch"]
FailureCause = Literal[
    "exception",  # an exception that is not listed below: another attempt may succeed
    "code",  # an exception that the same code would raise again, no matter on which ranks it runs
    "damaged checkpoint",  # the checkpoint from which the attempt had to continue turned out to be damaged
    "echo",  # a collective failed because another rank exited
    "interrupt",  # a KeyboardInterrupt
    "exit",  # sys.exit(), or a process that exited in another way, but on its own
    "signal",
    "out of memory",  # a MemoryError, a process that was killed because memory ran out, or a GPU's memory ran out
    "lost",  # the rank's member has disappeared without sending an Exited message
    "timed out",  # the driver ended an item because the item took longer than allowed
]
GpuFaultKind = Literal[
    "out of memory",
    "assert",  # a check in code on the GPU has failed, for example because an index is out of range
    "illegal access",  # code on the GPU has used memory that it may not use
    "launch failure",  # code on the GPU has crashed, and CUDA does not say why
    "hardware",  # an error that the GPU could not correct
    "lost",  # the GPU has fallen off the bus
    "no such device",  # the process does not see a GPU with this number, or none at all
    "busy",  # other processes do not let this one use the GPU
    "shared",  # NCCL refuses two ranks on the same GPU
    "timeout",  # an NCCL collective has not ended in time
    "xid",  # the driver of the GPU has reported an error, and nothing else is known
]
GpuHolderKind = Literal["rank", "notebook", "other gang", "other"]
DisplayType = Literal[
    "image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml", "text/html", "text/markdown", "text/latex"
]
# The phases of a rank's main thread that TimeSpent knows. The user can name others.
PHASES = (
    "data",  # reading data, or waiting for it
    "compute",
    "collective",
    "native",  # waiting in native code, for the other ranks, for data or for a GPU: nothing shows for which
    "save",  # saving or restoring checkpoints and other files
    "start",  # importing, tracing and compiling
    "idle",  # sleeping, or waiting for a lock, a file, input or another process
    "other",  # not known
)
PathKind = Literal["", "stdlib", "site"]
