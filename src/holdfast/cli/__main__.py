"""``python -m holdfast.cli`` is ``holdfast``, for where the script is not on the PATH."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
