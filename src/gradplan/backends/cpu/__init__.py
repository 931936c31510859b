"""The CPU backend: four engines in Numba, fed by formulas."""
