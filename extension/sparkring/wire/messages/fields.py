"""Types of the messages' fields."""

from typing import Annotated, Literal

Buffer = bytes | bytearray | memoryview
Buffers = tuple[Buffer, ...]
Count = Annotated[int, range(1 << 63)]
Port = Annotated[int, range(1, 1 << 16)]
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
    "out of memory",  # a MemoryError, or a process that was killed because memory ran out
    "lost",  # the rank's member has disappeared without sending an Exited message
    "timed out",  # the driver ended an item because the item took longer than allowed
]
DisplayType = Literal[
    "image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml", "text/html", "text/markdown", "text/latex"
]
PathKind = Literal["", "stdlib", "site"]
