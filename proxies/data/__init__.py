"""Corpora: text and token files become shards with a hashed manifest, which are read in batches.

Enters: text, JSON lines and parquet, on disk or in object stores; token files of nanoGPT, llm.c and
  Megatron-LM; a tokenizer file; the weights of the sources.
Leaves: a corpus folder; batches that depend only on the seed and the number of the first sequence.
Promises: the two splits share no document; a shard that changed after it was written is reported;
  any position of a run is read directly, without a replay of the positions before it.
Refuses: damaged shards, ids outside the vocabulary, the folder of another corpus, unknown formats.
"""
