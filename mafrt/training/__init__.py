"""Training: updates of adapters and critic from turns with advantages."""
