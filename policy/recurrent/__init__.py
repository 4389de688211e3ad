"""Recurrent mixers: gated delta nets and Kimi Delta Attention, the rules of their states, and short
convolutions."""
