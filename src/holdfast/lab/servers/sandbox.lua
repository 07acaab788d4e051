-- The environment that a script has inside the server, for Lua 5.1.
--
-- Loaded once, with two Python functions: sha1hex(text), and dispatch(word, ...), which runs a command on the current
-- store and returns a tag and its values. The tags, in both directions:
--
--   ":" value            an integer, a string, or false for nil
--   "*" count, ...       an array
--   "+" text             a status, in Lua {ok = text}
--   "-" text             an error, in Lua {err = text}
--   "!" exception        an error of the lab itself, which no script may catch
--
-- Returns compile(source), run(chunk, key count, words...), export(table) and pack(...).

local dispatch, sha1hex = ...

-- A script may not change anything that exists after its end. The server's Lua can make tables read-only; here a script
-- gets empty tables that read from the real ones.
local function deny()
  error("Attempt to modify a readonly table", 2)
end

local function readonly(table)
  return setmetatable({}, {__index = table, __newindex = deny, __metatable = false})
end

local function only(library, names)
  local kept = {}
  for name in names:gmatch("%S+") do
    kept[name] = library[name]
  end
  return readonly(kept)
end

local function receive(tag, ...)
  if tag == ":" then
    return (...)
  elseif tag == "*" then
    return {select(2, ...)}
  elseif tag == "+" then
    return {ok = (...)}
  end
  return nil, {err = (...)}
end

local redis = {}

function redis.call(...)
  local reply, failure = receive(dispatch(...))
  if failure then
    error(failure, 0)
  end
  return reply
end

function redis.pcall(...)
  local reply, failure = receive(dispatch(...))
  return failure or reply
end

function redis.sha1hex(...)
  if select("#", ...) ~= 1 then
    error("wrong number of arguments", 0)
  end
  return sha1hex((...))
end

-- If a script catches an error reply, the error becomes a text (in Valkey; in Redis 7 it stays a table). An error of the
-- lab goes on to the caller of the script.
local function caught(fine, problem, ...)
  if fine then
    return fine, problem, ...
  end
  if type(problem) == "userdata" then
    error(problem, 0)
  end
  if type(problem) == "table" and problem.err ~= nil then
    problem = problem.err
  end
  return fine, problem
end

local function bless(table, metatable)
  if getmetatable(table) == false then
    error("Attempt to modify a readonly table", 0)
  end
  return setmetatable(table, metatable)
end

-- No clock, no random numbers, no files: a script must do the same each time the explorer runs it.
local visible = {
  _VERSION = _VERSION,
  assert = assert,
  error = error,
  ipairs = ipairs,
  next = next,
  pairs = pairs,
  pcall = function(...) return caught(pcall(...)) end,
  select = select,
  setmetatable = bless,
  tonumber = tonumber,
  tostring = tostring,
  type = type,
  unpack = unpack,
  math = only(math, "abs ceil exp floor fmod huge log log10 max min modf pi pow sqrt"),
  string = only(string, "byte char find format gmatch gsub len lower match rep reverse sub upper"),
  table = only(table, "concat getn insert maxn remove sort"),
  redis = readonly(redis),
  server = readonly(redis),
}

local world = readonly(visible)
visible._G = world
setmetatable(visible, {
  __index = function(_, name)
    error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
  end,
})

local function compile(source)
  local chunk, problem = loadstring(source, "@user_script")
  if not chunk then
    return "-", "ERR Error compiling script (new function): " .. problem
  end
  return ":", setfenv(chunk, world)
end

local function export(value)
  if type(value) ~= "table" then
    return ":", value
  elseif type(value.err) == "string" then
    return "-", value.err
  elseif type(value.ok) == "string" then
    return "+", value.ok
  end
  local count = 0
  while value[count + 1] ~= nil do
    count = count + 1
  end
  return "*", count, unpack(value, 1, count)
end

local function finish(fine, result)
  if fine then
    return export(result)
  elseif type(result) == "userdata" then
    return "!", result
  elseif type(result) ~= "table" then
    return "-", "ERR " .. tostring(result)
  elseif type(result.err) == "string" or type(result.err) == "number" then
    return "-", tostring(result.err)
  end
  return "-", "ERR unknown error"
end

local function run(chunk, key_count, ...)
  local keys, argv = {}, {...}
  if key_count > 0 then
    local words = argv
    argv = {}
    for position, word in ipairs(words) do
      if position <= key_count then
        keys[position] = word
      else
        argv[position - key_count] = word
      end
    end
  end
  visible.KEYS, visible.ARGV = keys, argv
  return finish(pcall(chunk))
end

local function pack(...)
  return {...}
end

return compile, run, export, pack
