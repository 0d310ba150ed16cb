import horovod.tensorflow as hvd

hvd.init()
print("hello from rank", hvd.rank(), "of", hvd.size())
