"""What people see: the layout, the devices, the live view, the failure report. Facts come in as data, text goes out."""
