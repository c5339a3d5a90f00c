"""Data sets to run the A/B check on: `load_dataset(name, ...)`.

| name | what it is |
|---|---|
| `synthetic` | a simulator with known ground truth; needs nothing |
| `ml-100k` | MovieLens-100K, out of a package wheel |
| `obd` | Open Bandit Dataset (small), out of a package wheel |
| `criteo:PATH` | Criteo Kaggle `train.txt`, plain or .gz |
| `avazu:PATH` | Avazu `train` CSV, plain or .gz |
| `libsvm:PATH` | `label index:value ...`, plain or .gz |
| `module:function` | `function(request: DataRequest) -> Dataset` of your own |
"""

from __future__ import annotations

from mxfp8_recipe.ab.data import avazu, criteo, libsvm, ml100k, obd, synthetic
from mxfp8_recipe.ab.data.checked import CheckedDataset
from mxfp8_recipe.ab.data.lookup import DataError, resolve_function, unknown_name
from mxfp8_recipe.ab.types import DataRequest, Dataset, DatasetLoader

__all__ = ["CHOICES", "LOADERS", "DataError", "load_dataset"]

LOADERS: dict[str, DatasetLoader] = {
    "synthetic": synthetic.load,
    "ml-100k": ml100k.load,
    "obd": obd.load,
    "criteo": criteo.load,
    "avazu": avazu.load,
    "libsvm": libsvm.load,
}
CHOICES = ("synthetic", "ml-100k", "obd", "criteo:PATH", "avazu:PATH", "libsvm:PATH", "module:function")


def load_dataset(
    data: str,
    *,
    rows: int | None = None,
    seed: int = 0,
    strict: bool = False,
    weight_column: str | None = None,
    negative_sampling_rate: float = 1.0,
    offline: bool = False,
    extra: dict[str, str] | None = None,
) -> Dataset:
    """The data set called `data`, one of `CHOICES`.

    Args:
        rows: use the first `rows` impressions only.
        seed: of the simulator; files have none.
        strict: a malformed line of a file is an error, not a note.
        weight_column: column of row weights, where the format names its columns.
        negative_sampling_rate: the rate at which the data's negatives were kept. A file is taken as it is;
            the simulator drops negatives at this rate.
        offline: download nothing.
        extra: options by name; every data set knows `heldout`, the share of the last rows held out (0.2).

    Raises:
        DataError: an unknown name, a bad option or bad data; the message says what, got, expected, remedy.
        FileNotFoundError: no file at PATH.
    """
    name, _, source = data.partition(":")
    request = DataRequest(
        source=source,
        rows=rows,
        seed=seed,
        strict=strict,
        weight_column=weight_column,
        negative_sampling_rate=negative_sampling_rate,
        offline=offline,
        extra=extra or {},
    )
    if name in LOADERS:
        return LOADERS[name](request)
    if not source:
        raise unknown_name("data", data, CHOICES)
    dataset = resolve_function("data", data)(request)
    return CheckedDataset(dataset, data)
