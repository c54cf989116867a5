"""The script of the Megatron-LM export that turns the corpus into Megatron's files; `@NAME@` stands for its numbers.

It reads with forerun's own reader, exported beside it, and writes with Megatron's own builder.
"""

CONVERT_DATA = '''"""The corpus of a frozen launch config of forerun, as indexed files of Megatron-LM @VERSION@.

digest @DIGEST@

`python convert_data.py CORPUS FOLDER`; no GPU. Every source becomes NAME.bin and NAME.idx in FOLDER; `data_args.txt`,
written last, names them with their shares. A shard is one document: so Megatron cuts a shard's windows where forerun
does. Generated: an edit makes it another run.
"""

import sys
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from proxies.data.tokens import DataError, TokenStore

DATA_ID = @DATA_ID@
WEIGHTS = @WEIGHTS@


def main(corpus: Path, folder: Path) -> None:
    if len(str(folder).split()) != 1:
        sys.exit(f"{folder}: Megatron takes no path with a space in it")
    try:
        manifest = TokenStore(corpus, weights=WEIGHTS or None).manifest  # reads all of it: every hash is checked
    except DataError as error:
        sys.exit(str(error))
    if manifest.data_id != DATA_ID:
        sys.exit(f"{corpus} has data_id {manifest.data_id}, frozen as {DATA_ID}")
    folder.mkdir(parents=True, exist_ok=True)
    stored = np.dtype(manifest.dtype).newbyteorder("<")
    blend = []
    for source in manifest.sources:
        if source.weight:
            prefix = str(folder / source.name)
            builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16 if stored.itemsize == 2 else np.int32)
            for shard in source.train:
                tokens = np.memmap(corpus / shard.file, dtype=stored, mode="r")
                builder.add_document(tokens, [len(tokens)])
            builder.finalize(prefix + ".idx")
            blend.append((repr(source.weight), prefix))
    (folder / "data_args.txt").write_text(" ".join(map(" ".join, blend)) if len(blend) > 1 else blend[0][1])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: convert_data.py CORPUS FOLDER")
    main(Path(sys.argv[1]), Path(sys.argv[2]).absolute())
'''
