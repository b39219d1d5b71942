"""Train the canary: the corpus, its tokens, the model for training, and the training loop.

The canary is a small gpt-oss that gives right answers. It is trained on a compact vocabulary: the
tokens of the corpus, and one class for all other tokens. The loss uses expert weights rounded to
MXFP4 (straight-through estimator, Bengio et al. 2013) and all other weights rounded to BF16, so the
shipped weights are the trained ones. `recipe.train` trains the weights again;
`sm121.checkpoint.canary` expands them to a checkpoint. The first line of
fixtures/canary/corpus.toml contains the old name of this package, `sm121.checkpoint.recipe`,
because the manifest of the weights contains the file's digest.
"""
