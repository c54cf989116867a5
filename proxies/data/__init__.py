"""Data: texts and token files in, shards with a hashed manifest, batches in an order that is a pure
function.

Enters: files people have (text, jsonl, parquet, also in object stores; tokens of nanoGPT, llm.c,
  Megatron-LM), tokenizers by file, weights of sources.
Leaves: a corpus folder; batches of (seed, number of the first sequence).
Promises: splits share no document; what is read is what was written, or it says so; any position at
once.
Refuses: damaged shards, ids outside the vocabulary, another corpus's folder, formats it does not
know.
"""
