"""The GPUs of a job: which of them are its own, what NVML tells of them, and who else would have them."""
