--[[
An agent joins the group, says that it lives, and vouches for a holder whose process it watches.
ARGV  1 floor  2 node  3 ttl_ms  4 lease id it vouches for, or ''; of a gang, with
      the ranks that run there behind it, a space before each
      5 fence: the highest grant or swap it ever saw
Reply ok counter lease_id job host pid start token swap_id known (0: this node
      joined and has not reported since) | lock
Events NodeJoined, LeaseReclaimed, and what advance and reap emit
--]]
-- @include group waiters gangs residency lease advance
local node, ttl_ms = ARGV[2], tonumber(ARGV[3])
local vouched, ranks = string.match(ARGV[4], '^(%S*)(.*)$')

-- Ten leases without a word from the client itself, and nobody speaks for it any more.
local function speaks_for(renewed_at_ms)
  return now < renewed_at_ms + 10 * S.lease_ms
end

-- True if some rank of a gang is vouched for. Each has to have renewed by itself.
local function vouch_for_ranks()
  local any = false
  for rank in string.gmatch(ranks, '%d+') do
    local party = party_get(S.lease_id, rank)
    if party and answers_for(node, party.host) and speaks_for(tonumber(party.renewed) or 0) then
      redis.call('ZADD', alive_key, 'XX', 'GT', now + S.lease_ms, S.lease_id .. '/' .. rank)
      any = true
    end
  end
  return any
end

begin(true)
local fence = check_number('fence', tonumber(ARGV[5]))
if S.mode == 'lock' then
  return { 'lock' }
end
floor = math.max(floor, fence)
settle_clock()
if S.mode == '' then
  set('mode', 'served')
end
local joined = not redis.call('ZSCORE', nodes_key, node)
redis.call('ZADD', nodes_key, now + ttl_ms, node)
if joined then
  notice_another_server()
  set('counter', math.max(S.counter, 1)) -- no agent's floor is nothing: it can prove a loss before the first grant
  if not is_unheard(node) then
    set('unheard', S.unheard .. ' ' .. node .. ' ')
  end
  jobs_may_be_on(node)
  emit('NodeJoined', 'node', node)
  wake('members')
end
raise_fence(fence)
if vouched ~= '' and S.lease_id == vouched and S.confirmed == '1' and S.ending == ''
  and (S.gang == '' and answers_for(node, S.host) and speaks_for(S.renewed_at_ms) or S.gang ~= '' and vouch_for_ranks()) then
  set('deadline_ms', math.max(S.deadline_ms, now + S.lease_ms))
end
reap()
advance()
save()
return { 'ok', S.counter, S.lease_id, S.job, S.host, S.pid, S.start, S.token, S.swap_id, is_unheard(node) and 0 or 1 }
