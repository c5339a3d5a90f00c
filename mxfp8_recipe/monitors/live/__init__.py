"""The monitor of a training loop: what it listens to, how it runs the shadow, when it warns and where reports go."""
