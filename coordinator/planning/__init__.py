"""What each role of a run would hold and do on given machines, computed before anything is started."""
