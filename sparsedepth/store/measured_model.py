"""MeasuredModel: the facts of a model that was only measured, in place of a RunConfig."""

from typing import Annotated

from pydantic import Field

from sparsedepth.config.run import Count, MeasureOnlyConfig
from sparsedepth.files import digest


class MeasuredModel(MeasureOnlyConfig):
    """model.json: facts about the model, and how it was measured. A strict, frozen record."""

    model: Annotated[str, Field(min_length=1, description="the model's name or path, as given")]
    family: Annotated[str, Field(description="'sparsedepth' for a run, else the model_type of its config")]
    n_layers: Count
    d_model: Count
    n_heads: Count
    n_kv_heads: Count
    n_experts: Annotated[int, Field(ge=0, description="experts per block; 0 = dense")]
    vocab_size: Count
    params_total: Count
    dtype: Annotated[str, Field(description="dtype of the layers' weights when measured")]
    weights_hash: Annotated[str, Field(description="digest of the weight files")]
    data_hash: Annotated[str, Field(description="digest of the tokens read")]

    @property
    def run_id(self) -> str:
        """12 hex digits: the hash of every field."""
        return digest(self.model_dump(mode="json"))
