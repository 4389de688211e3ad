"""Teachers: frozen models that the updates or the advantages of a stage read."""
