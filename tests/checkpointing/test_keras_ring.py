"""`Store.keras(…)` on Horovod's ranks, with Keras 2 and 3."""

import pytest
from versions import KERAS

TRAIN = """
import horovod.tensorflow.keras as hvd, numpy as np, tensorflow as tf
from sparkring import checkpoints, shards
hvd.init()

def make():
    tf.keras.backend.clear_session()
    model = tf.keras.Sequential([tf.keras.Input((2,)), *map(tf.keras.layers.Dense, (8, 1))])
    model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.01)), "mse")
    return model

def fit(store, seed, stop=0):
    tf.keras.utils.set_random_seed(seed)
    model, data, read = make(), shards(path, 16, columns={"x": ["x", "y"], "y": "y"}, dtype="float32"), []
    resume = store.keras(model, data=data, every=3)
    def count(batch, logs):
        read.append(batch)
        if len(read) == stop:
            raise KeyError
    model.fit(data.as_tf("x", "y"), epochs=3, initial_epoch=resume.initial_epoch, verbose=0, callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), resume,
        tf.keras.callbacks.LambdaCallback(on_train_batch_end=count)])
    return [weight.tolist() for weight in model.get_weights()], read, data.epoch
"""


@pytest.mark.slow
@pytest.mark.versions("of Keras, which resumes the training")
def test_a_ring_goes_on(pair, numbered, tmp_path):
    """Horovod's ranks continue from a shared directory, and end with the weights of an uninterrupted run."""
    result = pair.run(
        f"""{TRAIN}
whole = fit(checkpoints(folder + "-whole"), seed=7)
torn = checkpoints(folder)
try:
    fit(torn, seed=7, stop=17)
except KeyError:
    torn.wait()  # on rank 0, which writes the checkpoints
hvd.allreduce(tf.constant(0.0))  # the other rank must not read the directory before
again = fit(checkpoints(folder), seed=8)
hvd.shutdown()
whole, again
""",
        namespace={"path": str(numbered), "folder": str(tmp_path / "runs")},
        framework="horovod",
    )
    weights = result.value[0][0]
    for (whole, _, _), (again, read, epoch) in result.values:
        assert whole == again == weights
        rest = range(5, 10) if KERAS.major == 2 else range(5)  # Keras 3 counts the batches of a fit() from 0
        assert read == [*rest, *range(10)]
        assert epoch == 4
