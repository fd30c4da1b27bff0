"""A measure of one's own: the root mean square of what each block adds to the stream."""

from sparsedepth.quantities.quantity import Measure, Quantity

MEASURE = Measure("block_rms", lambda sizes: (1, 0))
QUANTITIES = [Quantity("block_rms", "rms of u_l", "activation", tables=("runs", "layers"), better="low")]


def add_rows(context, rows):
    from sparsedepth.probe.fork import batches, probing, stream

    squares, n = [0.0] * context.probed.n_layers, 0
    with probing(context.probed):
        for tokens_BT in batches(context.probed, context.inputs):
            x = list(stream(context.probed, tokens_BT))
            n += x[0].numel()
            squares = [s + float(((b - a) ** 2).sum()) for s, a, b in zip(squares, x[:-1], x[1:], strict=True)]
    norms = [(s / n) ** 0.5 for s in squares]
    rows.summary["block_rms"] = sum(norms) / len(norms)
    rows.add_layers("block_rms", norms, context.n_tokens)
