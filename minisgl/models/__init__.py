"""The models: their files (`builtin`, `resolve`) and their arithmetic. Importing this package loads no torch."""
