-- Read what a name is in use as: its holders, and one page of its waiters. Nothing is written.
--
-- KEYS 1 the lock   2 the last fences given out for this name, see fence.lua   3 the queue   4 its waiters
--      5 the holders of a permit pool   6 the latch   7 its waiters   8 the claim on a cached value   9 its waiters
-- ARGV 1 the first entry of the page, from 0   2 the number of entries (at most 100)
--
-- Returns {now_us, kind, lock, pool, queue, latch, claim}; kind is nil for a mutex. Each of the others is nil or
--         lock    {token, ms, fences, kept}: ms until it expires (-1: never); kept is 1 if the lock is kept for a waiter
--         pool    {number of holders, token, end, slot, fence, ...}: times in us as text; fence is negated, or nil
--         queue   {number of entries, token, time of arrival, entry, ...}: see queue.lua; entry may be nil
--         latch   {state, number of waiters, token and channel, time of the last request, ...}
--         claim   {token, ms, number of waiting processes}
--
-- One step, because a token read now and a fence read later could be those of two holders. It writes nothing, so a replica
-- can answer it. A page bounds the work, whatever the length of the queue. A key of another type counts as missing.

local first, last = tonumber(ARGV[1]), ARGV[1] + math.min(ARGV[2], 100) - 1
local refused

local function read(...)
  local reply = redis.pcall(...)
  if type(reply) ~= 'table' or not reply.err then
    return reply
  elseif not string.find(reply.err, 'WRONGTYPE', 1, true) then
    refused = reply -- not allowed: the caller must know, because a lock that cannot be read is not free
  end
  return false
end

local function members(key, from, to)
  return read('ZRANGE', key, from, to, 'WITHSCORES') or {}
end

local time = redis.call('TIME')
local now_us = time[1] .. string.sub('00000' .. time[2], -6)
local token = read('GET', KEYS[1])
local kind = read('HGET', KEYS[4], 'kind')
local marked = read('ZSCORE', KEYS[3], '') and 1 or 0

local lock = false
if token then
  local kept = read('ZSCORE', KEYS[3], token) and 1 or 0
  lock = {token, redis.call('PTTL', KEYS[1]), read('GET', KEYS[2]), kept}
end

local pool = false
local holders = math.floor((read('ZCARD', KEYS[5]) or 0) / 3) -- of n holders, the last n members are their ends
if holders > 0 then
  pool = {holders}
  local ends = members(KEYS[5], 2 * holders + first, 2 * holders + last)
  for index = 1, #ends, 2 do
    pool[#pool + 1] = ends[index]
    pool[#pool + 1] = ends[index + 1]
    pool[#pool + 1] = read('ZSCORE', KEYS[5], 'slot ' .. ends[index])
    pool[#pool + 1] = read('ZSCORE', KEYS[5], 'fence ' .. ends[index])
  end
end

local queue = false
local entries = (read('ZCARD', KEYS[3]) or 0) - marked
if entries > 0 then
  queue = {entries}
  local tokens = members(KEYS[3], marked + first, marked + last)
  for index = 1, #tokens, 2 do
    queue[#queue + 1] = tokens[index]
    queue[#queue + 1] = tokens[index + 1]
    queue[#queue + 1] = read('HGET', KEYS[4], tokens[index])
  end
end

local latch = false
local state = read('GET', KEYS[6])
if state then
  latch = {state, read('ZCARD', KEYS[7]) or 0}
  for _, value in ipairs(members(KEYS[7], first, last)) do
    latch[#latch + 1] = value
  end
end

local claim = false
local computing = read('GET', KEYS[8])
if computing then
  claim = {computing, redis.call('PTTL', KEYS[8]), read('HLEN', KEYS[9]) or 0}
end
return refused or {tonumber(now_us), kind, lock, pool, queue, latch, claim}
