"""`clearhead bench`: is this installation correct, and how fast is it on this machine?"""
