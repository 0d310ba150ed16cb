import os

print("hello from rank", os.environ["HOROVOD_RANK"])
