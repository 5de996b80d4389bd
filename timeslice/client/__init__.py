"""What a job uses: clients, leases, holds. The public names are in ``timeslice``."""
