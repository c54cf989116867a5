"""Convert the corpus of a frozen launch config of forerun to indexed files of Megatron-LM.

Run `python convert_data.py CORPUS FOLDER`; it needs no GPU. Every source of the corpus becomes
NAME.bin and NAME.idx in FOLDER. `data_args.txt`, which is written last, lists these files with
their weights. A shard of the corpus becomes one document, so that Megatron cuts windows where
forerun does. The program reads the corpus with forerun's reader, which is part of the export, and
writes with Megatron's builder.
"""

import sys
from pathlib import Path

import numpy as np
from forerun_numbers import open_corpus, read_numbers, refuse
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

FROZEN = read_numbers()


def main(corpus: Path, folder: Path) -> None:
    """Write each source with a weight above 0 to `folder`, and then `data_args.txt`."""
    if len(str(folder).split()) != 1:
        refuse(f"{folder}: Megatron accepts no path with a space in it")
    manifest = open_corpus(FROZEN, str(corpus)).manifest
    folder.mkdir(parents=True, exist_ok=True)
    stored = np.dtype(manifest.dtype).newbyteorder("<")
    blend = []
    for source in manifest.sources:
        if source.weight:
            prefix = str(folder / source.name)
            builder = IndexedDatasetBuilder(
                prefix + ".bin", dtype=np.uint16 if stored.itemsize == 2 else np.int32
            )
            for shard in source.train:
                tokens = np.memmap(corpus / shard.file, dtype=stored, mode="r")
                builder.add_document(tokens, [len(tokens)])
            builder.finalize(prefix + ".idx")
            blend.append((repr(source.weight), prefix))
    (folder / "data_args.txt").write_text(
        " ".join(map(" ".join, blend)) if len(blend) > 1 else blend[0][1]
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        refuse("usage: convert_data.py CORPUS FOLDER")
    main(Path(sys.argv[1]), Path(sys.argv[2]).absolute())
