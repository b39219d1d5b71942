"""How the canary was taught: the corpus, its tokens, the model for training, and the loop.

The canary is a small gpt-oss that answers. It is trained on a compact vocabulary: the tokens of the
corpus, and one class that stands for every other token. Expert weights are seen by the loss only as
MXFP4 values (straight-through estimator, Bengio et al. 2013) and everything else only as BF16, so
that what is shipped is what was trained. Run `recipe.train` to make the weights again;
`sm121.checkpoint.canary` expands them. The first line of fixtures/canary/corpus.toml has the old
name of this package, `sm121.checkpoint.recipe`: the weights' manifest has the file's digest.
"""
