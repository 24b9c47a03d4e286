"""Start the processes of a job."""
