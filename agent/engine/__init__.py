"""The pass: observe, plan, apply, observe again; what it remembers between passes, and what it may disturb."""
