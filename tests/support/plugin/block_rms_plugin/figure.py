"""A figure of one's own: a dot for each run, loss against layers."""


def dots(store):
    from matplotlib.figure import Figure

    from sparsedepth.plots.page import Drawing

    data = store.frame("select n_layers, val_loss from runs order by all")

    def page():
        figure = Figure()
        figure.subplots().plot(data["n_layers"], data["val_loss"], "o")
        return figure

    return Drawing(page=page, data=data)


FIGURES = {"dots": (dots, "loss of each run against its layers")}
