"""Plain values that all packages use, and their arithmetic. No database; only `tensor_kinds` and
`torch_settings`, which describe PyTorch's tensors and settings, import torch.

Read first: `tuple`, `protocol`, `request`, `reading` with `details`, `figure` with `intervals`.
`fields` declares the fields of records, `stored` converts records to JSON."""
