"""Model configurations, batches and forward passes."""
