"""Small programs that use Holdfast, to be read and run."""
