"""The theory of a constant threshold as functions of measurable numbers.

Sahu et al., *Rethinking gradient sparsification as total error minimization* (NeurIPS 2021, arXiv:2108.00951). n
workers minimise f = (1/n) Σ_i f_i by steps x ← x − γ (1/n) Σ_i out_i of a constant learning rate γ. Worker i draws a
gradient g_i = ∇f_i(x) + ξ_i, forms p_i = e_i + g_i, sends out_i of it, and keeps e_i = p_i − out_i. The numbers of a
problem:

    L       ‖∇f(x) − ∇f(y)‖ ≤ L ‖x − y‖                          how fast gradients change
    M, σ²   E‖ξ_i‖² ≤ M ‖∇f_i(x)‖² + σ²                          how noisy they are
    C, ζ²   (1/n) Σ_i ‖∇f_i(x) − ∇f(x)‖² ≤ C ‖∇f(x)‖² + ζ²       how different the workers' data are
    D       D = (1/n) Σ_i ‖∇f_i(x*)‖²                            how different they are at the minimiser x* of f
    μ       every f_i is μ-strongly convex

The constants of the bounds are those of the proofs in docs/concepts/theory.md, which are short and complete.
"""

from lightning_sparse.theory.bounds import Problem as Problem
from lightning_sparse.theory.bounds import convex_bound as convex_bound
from lightning_sparse.theory.bounds import nonconvex_bound as nonconvex_bound
from lightning_sparse.theory.bounds import nonconvex_contraction_bound as nonconvex_contraction_bound
from lightning_sparse.theory.bounds import squared_error_bound as squared_error_bound
from lightning_sparse.theory.bounds import threshold_from_estimates as threshold_from_estimates
from lightning_sparse.theory.bounds import top_k_squared_error_bound as top_k_squared_error_bound
from lightning_sparse.theory.lag import ResidualStatistics as ResidualStatistics
from lightning_sparse.theory.lag import residual_statistics as residual_statistics
from lightning_sparse.theory.measurement import measured_noise as measured_noise
from lightning_sparse.theory.measurement import optimal_threshold as optimal_threshold
from lightning_sparse.theory.rates import convex_contraction_rate as convex_contraction_rate
from lightning_sparse.theory.rates import convex_rate as convex_rate
from lightning_sparse.theory.rates import strongly_convex_contraction_rate as strongly_convex_contraction_rate
from lightning_sparse.theory.rates import strongly_convex_rate as strongly_convex_rate
from lightning_sparse.theory.rates import top_k_contraction as top_k_contraction
