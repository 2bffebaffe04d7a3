"""The pocket family: small models trained for this project, and the script that trained them."""
