import horovod.torch as hvd

hvd.init()
print("hello from rank", hvd.rank(), "of", hvd.size())
