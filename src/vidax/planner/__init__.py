"""What a run on TPUs would take: chips that need not be here (`chips`), seconds of compiled programs (`schedule`)."""
