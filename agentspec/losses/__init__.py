"""Pure losses: group advantages, clipped policy loss, SFT, and how tokens are averaged."""
