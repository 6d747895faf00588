"""Random trainings, each drawn from a seed, against a simulation of n workers in plain tensors.

    python -m tests.distributed.fuzz --cases 200
    python -m tests.distributed.fuzz --seed 17        # repeats a case

A case is a model, DDP's options, those of the exchange, and what happens in its 4 to 12 steps: layers left out,
gradients that jump by 1e4, workers with nothing to say, NaN, overflows of a loss scale. The gradient of a layer is a
random tensor that any process can make from (case, step, worker, layer), so the first worker makes all of them,
collects all workers' residuals, and after every step checks

1. conservation   (S/n) Σ_i (p_i − e'_i), of the residuals that the workers have, is the gradient that they got
2. the bound      |e'| < λ
3. replicas       gradients, weights and statistics have the same bits on every worker
4. agreement      residuals, gradients and StepStats are those of the simulation, coordinate by coordinate

The simulation works by parameter name; of the package it uses nothing.
"""
