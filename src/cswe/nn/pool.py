"""The pooling layer: a set of vectors in, one vector out."""

from types import ModuleType

import torch
from torch import Tensor, nn

from cswe.nn._door import check_sets, enter, result_dtype
from cswe.nn.projected import ProjectedSets, uniform_or_given
from cswe.nn.ragged import Sets, all_values, as_padded, is_ragged, map_groups, without_mask
from cswe.nn.readouts import Readout, make_readout
from cswe.nn.slicer import Initialisation, Slicer
from cswe.nn.statistics import TokenStatistics, principal_start
from cswe.nn.token_weights import TokenWeights
from cswe.ops._gpu import gpu_kernels
from cswe.ops._inputs import whole, without_autocast, working_dtype
from cswe.ops.embedding import ORDERS, Interpolation, Order


class SWEPool(nn.Module):
    r"""Pool sets of vectors by sliced Wasserstein embedding: :math:`(B, N, d) → (B, \mathrm{out\_dim})`.

    Tokens are projected on L learned directions; along each one the set is a distribution of numbers, and a readout
    keeps a few numbers of it. By default these are two L-moments, mean and spread, under a learned weighting of the
    tokens, which serves well on tokens of large backbones, ``readout="statistics", weightings=1`` a few tenths better
    still (docs/results.md); ``"moments:8"`` keeps more of the shape of raw sets, ``readout="flatten"`` gives the
    paper's embedding, the displacement of every reference point.

    Parameters
    ----------
    dim
        Dimension d of the tokens.
    slices
        Number L of directions.
    points
        Number M of reference points. Readouts that compare with a reference need it, and so does
        :class:`~cswe.SWGGBound`; ``None``: no reference.
    readout
        ``"moments:K"``, ``"statistics"``, ``"flatten"``, ``"map-points"``, or a :class:`~cswe.nn.readouts.Readout`.
        ``None``: ``"moments:2"``. ``"moments:K:MEANS"``, ``"statistics:MEANS"``: the mean along the first so many
        slices only: those along d of them say the rest, and leave room for spreads along more slices.
    weightings
        Number H of learned weightings of the tokens (:class:`~cswe.nn.TokenWeights`); the embedding has H parts, one
        for each, on the same slices, which are sorted once for all. 0: the uniform measure (or given weights).
        ``None``: 1 if the readout is left to us, too, and 0 with a readout of your choice.
    order
        How displacements are listed: ``"rank"``, or ``"reference"`` as in the paper; ``"argsort"``: wrongly, as in
        public code, see :func:`cswe.ops.swe`.
    standardize
        Subtract the tokens' mean and divide by their common spread first, both measured by :meth:`init_from`.
    interpolation
        Quantile functions on M ranks: ``"barycentric"``, or ``"linear"`` (without weights).
    init
        Initial slices: ``"orthogonal"`` or ``"normal"``; :meth:`init_from` takes them from data.
    train_slices, train_reference
        Whether slices and reference are learned.
    normalize_keys
        Weigh tokens by their directions alone; see :class:`~cswe.nn.TokenWeights`.

    Notes
    -----
    With ``Moments(1)`` and d orthogonal slices this is mean pooling up to a rotation; with weightings, attention
    pooling. The names in ``state_dict`` are fixed: ``slicer.weight``, ``reference``, ``token_weights.*``.

    Examples
    --------
    >>> pool = SWEPool(dim=8, slices=16, points=10)
    >>> tokens, mask = torch.randn(4, 7, 8), torch.ones(4, 7, dtype=torch.bool)
    >>> pool(tokens, mask).shape, pool.out_dim
    (torch.Size([4, 32]), 32)
    """

    reference: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        slices: int,
        points: int | None = None,
        readout: str | Readout | None = None,
        weightings: int | None = None,
        order: Order = "rank",
        standardize: bool = False,
        *,
        interpolation: Interpolation = "barycentric",
        init: Initialisation = "orthogonal",
        train_slices: bool = True,
        train_reference: bool = True,
        normalize_keys: bool = False,
    ) -> None:
        super().__init__()
        dim, slices = whole(dim, "dim"), whole(slices, "slices")
        points = None if points is None else whole(points, "points", more=" or None")
        if weightings is None:
            weightings = int(readout is None and interpolation != "linear")
        weightings = whole(weightings, "weightings", least=0)
        if order not in ORDERS:
            raise ValueError(f"expected order to be one of {', '.join(ORDERS)} but got {order!r}")
        if interpolation not in ("barycentric", "linear"):
            raise ValueError(f"expected interpolation 'barycentric' or 'linear' but got {interpolation!r}")
        if interpolation == "linear" and weightings:
            raise ValueError("linear interpolation takes no weights: use 'barycentric', or weightings=0")
        self.dim, self.slices, self.points, self.weightings = dim, slices, points, weightings
        self.order: Order = order
        self.interpolation: Interpolation = interpolation
        self.slicer = Slicer(dim, slices, init, trainable=train_slices)
        self.readout = make_readout("moments:2" if readout is None else readout, slices, points)
        if self.readout.needs_reference and points is None:
            raise ValueError(f"the readout {type(self.readout).__name__} compares with a reference: give points=M")
        self.token_weights = TokenWeights(dim, weightings, normalize_keys) if weightings else None
        self.statistics = TokenStatistics(dim) if standardize else None
        self.register_parameter(
            "reference",
            None if points is None else nn.Parameter(torch.empty(points, dim), requires_grad=train_reference),
        )
        self.out_dim = self.readout.size(slices, points, max(1, weightings))
        self._reset_reference()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        self.slicer.reset_parameters()
        self._reset_reference()
        if self.token_weights is not None:
            self.token_weights.reset_parameters()
        for module in self.readout.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    @torch.no_grad()
    def _reset_reference(self) -> None:
        if self.reference is not None:
            self.reference.normal_()

    @torch.no_grad()
    def init_from(self, tokens: Sets, mask: Tensor | None = None, *, seed: int = 0) -> "SWEPool":
        """Start from data: principal directions as slices, quantiles along them as reference.

        With ``standardize``, the tokens' mean and spread are measured first and kept as buffers.

        Parameters
        ----------
        tokens, mask
            A sample of the training tokens, as in :meth:`forward`.
        seed
            For what is drawn: directions beyond the d principal ones, and how quantiles of different directions are
            combined to points.

        Returns
        -------
        SWEPool
            The pool itself.
        """
        if is_ragged(tokens):
            tokens, mask = all_values(without_mask(tokens, mask)).unsqueeze(0), None
        tokens = as_padded(tokens)
        values, valid, _ = enter(tokens, mask, None, self.dim, torch.float64)
        flat = values.reshape(-1, self.dim) if valid is None else values[valid]
        if self.statistics is not None:
            flat = self.statistics.measure(flat)
        directions, reference = principal_start(flat, self.slices, self.points, seed)
        self.slicer.assign(directions)
        if self.reference is not None and reference is not None:
            self.reference.copy_(reference)
        return self

    def standardized(self, tokens: Tensor) -> Tensor:
        """Apply the standardisation, if there is one, to tokens ``(…, d)``."""
        return tokens if self.statistics is None else self.statistics(tokens)

    @without_autocast
    def project(self, tokens: Tensor, mask: Tensor | None = None, weights: Tensor | None = None) -> ProjectedSets:
        """Project, and weigh, a batch of sets: everything before the readout."""
        if weights is not None and self.interpolation == "linear":
            raise ValueError("linear interpolation takes no weights: use interpolation='barycentric'")
        dtype = working_dtype(tokens, self.slicer.weight)
        frozen = not (tokens.requires_grad and torch.is_grad_enabled())
        stored = gpu_kernels("cuda_stored", self.slicer.weight, half=(tokens,)) if frozen else None
        if stored is None:
            values, valid, given = enter(tokens, mask, weights, self.dim, dtype)
            values = self.standardized(values)
            projections = self.slicer(values)
            masses = uniform_or_given(given) if self.token_weights is None else self.token_weights(values, valid, given)
        else:
            valid, given = check_sets(tokens, mask, weights, self.dim, dtype)
            projections, masses = self._project_stored(stored, tokens, valid, given)
        reference = None
        if self.reference is not None and self.readout.needs_reference:
            reference = self.slicer.directions().to(dtype) @ self.reference.to(dtype).T
        return ProjectedSets(projections, valid, masses, reference, self.interpolation, self.order)

    def _project_stored(
        self, kernels: ModuleType, tokens: Tensor, mask: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Project and weigh tokens that have no gradient, on a GPU, as they are stored."""
        centre, factor = (None, None) if self.statistics is None else self.statistics.shift_and_factor()
        directions = self.slicer.directions()
        projections, squares = kernels.project_stored(tokens, mask, centre, factor, directions, are_unit=True)
        if self.token_weights is None:
            return projections, uniform_or_given(weights)
        products, _ = kernels.project_stored(tokens, mask, centre, factor, self.token_weights.directions(torch.float32))
        length = None
        if self.token_weights.normalize_keys:
            length = squares.sqrt() if factor is None else squares.sqrt() * factor
        return projections, self.token_weights.masses(products, length, mask, weights)

    @without_autocast
    def read(self, sets: ProjectedSets) -> Tensor:
        """Read projected sets."""
        vector: Tensor = self.readout(sets)
        return vector

    def forward(self, tokens: Sets, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Pool sets of vectors.

        Parameters
        ----------
        tokens
            ``(B, N, d)``; or sets of different sizes as ``(values, ptr)``, values ``(T, d)`` and ptr ``(B + 1,)`` as in
            PyTorch Geometric; or a nested tensor.
        mask
            ``(B, N)``, bool or 0/1, True = valid (Hugging Face's ``attention_mask`` works as it is). What is masked is
            never read.
        weights
            Masses ``(B, N)``, or ``(T,)`` for ragged sets; with weightings they multiply in.

        Returns
        -------
        Tensor
            ``(B, out_dim)``.
        """
        if is_ragged(tokens):
            return map_groups(self, without_mask(tokens, mask), weights)
        tokens = as_padded(tokens)
        vector = self.read(self.project(tokens, mask, weights))
        return vector.to(result_dtype(tokens, self.slicer.weight))

    def explain(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        target: Tensor | None = None,
    ) -> Tensor:
        """Split the pooled vector among the tokens it comes from, ``(B, L, N)``: :func:`cswe.nn.explain_slices`."""
        from cswe.nn.explain import explain_slices

        return explain_slices(self, tokens, mask, weights, target)

    def extra_repr(self) -> str:
        """Describe the layer."""
        parts = [f"dim={self.dim}", f"slices={self.slices}", f"points={self.points}", f"weightings={self.weightings}"]
        if self.readout.needs_reference:
            parts += [f"order={self.order!r}", f"interpolation={self.interpolation!r}"]
        return ", ".join([*parts, f"out_dim={self.out_dim}"])
